"""What benchmarks share: a model profiled and trained on two gloo ranks of this machine, or more.

`profile` and `train` start torchrun on `ranks.py` and read what the ranks found; nothing of torch is loaded here.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.layer import Attention, Layer
from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.plan import Plan

ROOT = Path(__file__).resolve().parents[1]
RANKS = Path(__file__).resolve().with_name("ranks.py")

Packs = tuple[tuple[int, tuple[int, ...]], ...]
"""Tiles, and the lengths of the samples, of each pack of an iteration."""


@dataclass(frozen=True)
class Llama:
    """A language model of equal layers."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    ffn_hidden_size: int
    vocab_size: int

    @property
    def architecture(self) -> LanguageArchitecture:
        """The model."""
        attention = Attention(self.heads, self.kv_heads, self.hidden_size // self.heads)
        layers = (Layer(attention, self.ffn_hidden_size),) * self.layers
        return LanguageArchitecture(layers, self.hidden_size, self.vocab_size)


@dataclass(frozen=True)
class Shape:
    """A model and the budgets of its packs."""

    name: str
    vision: VisionArchitecture
    language: Llama
    vit_budget: int
    llm_budget: int

    @property
    def architecture(self) -> Architecture:
        """The model."""
        return Architecture(self.name, self.vision, self.language.architecture)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Shape":
        """The shape in a decoded JSON object."""
        vision, language = VisionArchitecture(**record["vision"]), Llama(**record["language"])
        return cls(**{**record, "vision": vision, "language": language})


Contents = tuple[tuple[tuple[int, int, int], ...], ...]
"""Number, tiles and tokens of the real samples of each pack of an iteration."""


@dataclass(frozen=True)
class Case:
    """A plan and the packs of one iteration; without contents, of noise. Cases of one name train one model.

    With widths, ranks that run each pack, those of one rank come in as many as there are ranks.
    """

    name: str
    plan: Plan
    packs: Packs
    contents: Contents = ()
    widths: tuple[int, ...] = ()


def sizes_of(packs: Packs) -> PackSizes:
    """For the simulator: one iteration, one data-parallel rank."""
    columns = zip(*((t, sum(n), sum(length**2 for length in n)) for t, n in packs), strict=True)
    return PackSizes(*(np.array([[column]], dtype=np.int64) for column in columns))


@dataclass(frozen=True)
class Trained:
    """What the ranks found of a case."""

    seconds: list[float]
    """Of each iteration, the slower rank's."""
    work: list[list[float]]
    """Of each iteration, seconds of the processor that each rank took: those in which it waits are not among them."""
    peak_bytes: list[float]
    """Of each rank: weights, gradients, optimizer state, and the most that autograd held at once; 0: not counted."""
    losses: list[float]
    """Of each iteration, warm-up included: the mean over its tokens."""
    disturbed: list[float]
    """Of each iteration, the share of its actions' time in which a rank had no processor, of the rank with most."""


def profile(
    shape: Shape, steps: int = 9, data_parallel: int = 1, ranks: int = 2, frozen: Sequence[str] = ()
) -> Profile:
    """Measured on all ranks at once."""
    order = {"shape": asdict(shape), "steps": steps, "data_parallel": data_parallel, "frozen": frozen}
    return Profile.from_record(_torchrun(order, ranks))


def train(
    shape: Shape,
    cases: Sequence[Case],
    rounds: int,
    warm_up: int = 2,
    pipeline: int = 2,
    ranks: int = 2,
    count_bytes: bool = True,
    frozen: Sequence[str] = (),
) -> list[Trained]:
    """Train all cases in turns: a round is one iteration of each, so that they see the same weather.

    The ranks are a pipeline, or with `pipeline` 1 data-parallel: of a case's packs they take turns.
    """
    listed = [{**asdict(case), "plan": case.plan.to_record()} for case in cases]
    order = {
        "cases": listed,
        "rounds": rounds + warm_up,
        "pipeline": pipeline,
        "count_bytes": count_bytes,
        "frozen": frozen,
    }
    found = _torchrun({"shape": asdict(shape), **order}, ranks)
    return [
        Trained(
            one["seconds"][warm_up:],
            one["work"][warm_up:],
            one["peak_bytes"],
            one["losses"],
            one["disturbed"][warm_up:],
        )
        for one in found
    ]


def _torchrun(order: dict[str, Any], ranks: int = 2) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "order.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(order))
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            str(RANKS),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [*command, str(asked), str(answered)], env=environment, capture_output=True, text=True, check=False
        )
        if not answered.exists():
            raise RuntimeError(done.stderr[-8000:])
        return json.loads(answered.read_text())
