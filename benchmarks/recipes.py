"""Finds the parallel sizes of examples/recipes: for each model and number of H100s the fastest that fits, predicted.

    python benchmarks/recipes.py [MODEL...] [--gpus 8 32 64]

Each candidate is `omnibal launch --config CANDIDATE --dry-run --analytic h100`: packs that fill the budgets, half of
whose tokens are images, at analytic costs. Writes the fastest of each, with what is predicted for it. That of one H200
is written by hand: 12 bytes a weight by Transformer Engine's optimizer, where 18 would not fit.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omnibal_ext.console import print_table, track
from omnibal_ext.units import GIB

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "examples/recipes"
TOKENS = 16384
"""Of a pack."""
A_STEP = {8: 2**19, 32: 2**20, 64: 2**21}
"""Tokens of a step, by the number of GPUs."""


@dataclass(frozen=True)
class Subject:
    """A model, its ViT budget, and the (tensor, pipeline, expert) sizes that are tried."""

    model: str
    vit_budget: int
    sizes: tuple[tuple[int, int, int], ...]


DENSE_8B = ((1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 1, 1), (2, 2, 1))
DENSE_30B = ((1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (4, 4, 1), (2, 8, 1))
MIXTURE_30B = ((1, 1, 8), (1, 2, 4), (1, 4, 2), (2, 2, 4), (1, 2, 8), (1, 4, 8))
SUBJECTS = (
    Subject("internvl3.5-8b", 32, DENSE_8B),
    Subject("qwen3-vl-8b", 32768, DENSE_8B),
    Subject("qwen3-vl-30b-a3b", 32768, MIXTURE_30B),
    Subject("qwen3-vl-32b", 32768, DENSE_30B),
    Subject("qwen3.5-27b", 32768, DENSE_30B),
    Subject("gemma-4-31b", 73728, DENSE_30B),
)


def candidates(subject: Subject, gpus: int) -> Iterator[dict[str, Any]]:
    """The flags of every candidate."""
    for tensor, pipeline, experts in subject.sizes:
        replicas = gpus // (tensor * pipeline)
        packs = A_STEP[gpus] // TOKENS
        if not replicas or packs % replicas or packs // replicas < pipeline or experts > tensor * replicas:
            continue
        machine = {"nproc-per-node": 8} | ({"nnodes": gpus // 8} if gpus > 8 else {})
        sizes = {"tensor-model-parallel-size": tensor, "pipeline-model-parallel-size": pipeline}
        sizes |= {"expert-model-parallel-size": experts} if experts > 1 else {}
        packing = {"vit-budget": subject.vit_budget, "llm-budget": TOKENS, "micro-batches": packs // replicas}
        switches = {"sequence-parallel": True} if tensor > 1 else {}
        yield {"model": subject.model, **machine, **sizes, **packing, "memory-gib": 72, **switches}


def predicted(flags: dict[str, Any], device: str = "h100") -> dict[str, float] | str:
    """Seconds a step, tokens a second on each GPU and the most memory of a rank, as planned; or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.json"
        recipe.write_text(json.dumps({"flags": flags}))
        command = [sys.executable, "-W", "ignore", str(ROOT / "tools/launch.py"), "--config", str(recipe)]
        command += ["--rdzv-endpoint", "HOST:29500"] if "nnodes" in flags else []
        command += ["--analytic", device, "--dry-run", "--json", "--run-dir", str(Path(folder) / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    plan = json.loads(done.stdout)["plan"]["predicted"]
    gpus = flags["nproc-per-node"] * flags.get("nnodes", 1)
    replicas = gpus // (flags["tensor-model-parallel-size"] * flags["pipeline-model-parallel-size"])
    tokens = flags["llm-budget"] * flags["micro-batches"] * replicas
    return {
        "step_seconds": round(plan["step_seconds"], 2),
        "tokens_per_second_per_gpu": round(tokens / plan["step_seconds"] / gpus),
        "memory_gib": round(max(plan["stage_peak_bytes"]) / GIB, 1),
    }


def main() -> None:
    """Find and write the recipes; print all candidates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 32, 64], choices=A_STEP)
    arguments = parser.parse_args()
    subjects = [subject for subject in SUBJECTS if not arguments.models or subject.model in arguments.models]
    tried = [(one, gpus, flags) for one in subjects for gpus in arguments.gpus for flags in candidates(one, gpus)]
    found: dict[tuple[str, int], tuple[dict[str, Any], dict[str, float]]] = {}
    rows = []
    for subject, gpus, flags in track(tried, "planning", len(tried)):
        said = predicted(flags)
        sizes = [flags.get(f"{kind}-model-parallel-size", 1) for kind in ("tensor", "pipeline", "expert")]
        rows.append((subject.model, gpus, *sizes, *(said.values() if isinstance(said, dict) else ("", said[:60], ""))))
        if isinstance(said, dict):
            best = found.get((subject.model, gpus))
            if best is None or said["step_seconds"] < best[1]["step_seconds"]:
                found[subject.model, gpus] = flags, said
    heads = ("model", "H100s", "tensor", "pipeline", "expert", "step s", "tokens/s a GPU", "GiB")
    print_table("candidates", heads, rows)
    for (model, gpus), (flags, said) in found.items():
        path = RECIPES / f"{model}-{gpus}xh100.json"
        path.write_text(json.dumps({"flags": flags, "predicted": said}, indent=2) + "\n")


if __name__ == "__main__":
    main()
