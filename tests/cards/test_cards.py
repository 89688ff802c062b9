"""The trainer from its command line to its second start, and the tools, on a machine that says it has GPUs.

The machine (`machine.py`) ends a run that allocates before it has its card, or computes across two cards or a card and
the host; what the host waits for is named.
"""

import json
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from omnibal_ext.architectures.presets import preset
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.plan import Plan
from omnibal_ext.run_metrics import evaluations, training_intervals
from tests.long import short
from tests.programs import CARDS, ENGINE_CARDS, ROOT, result_of, run_ranks, tool
from tests.system.families import build

pytest.importorskip("transformers")
pytestmark = pytest.mark.starts
STOPS, ENDS = 2, 3
"""Iterations after which the first start stops, and the second ends."""


@dataclass(frozen=True)
class Case:
    """A run: what, on which machine and ranks, by which schedule."""

    family: str
    machine: str
    schedule: str
    chunks: int = 1
    ranks: int = 2
    flags: tuple[str, ...] = ("--bf16",)

    def __str__(self) -> str:
        engine = "engine" if self.machine == ENGINE_CARDS else "local"
        return f"{self.family} {self.schedule} x{self.chunks} on {self.ranks}, {engine}"


TENSOR = ("--bf16", "--tensor-model-parallel-size", "2", "--sequence-parallel", "--num-workers", "0")
"""Without processes that read images, which import torch anew: other cases have them."""
CASES = (
    Case("internvl3.5", CARDS, "1f1b", ranks=4, flags=TENSOR), Case("qwen2.5-vl", CARDS, "1f1b", chunks=2),
    Case("gemma-3", CARDS, "zb_h1"), Case("qwen3-vl-moe", CARDS, "zb_v", chunks=2),
    Case("internvl3.5", ENGINE_CARDS, "1f1b", ranks=4), Case("qwen2.5-vl", ENGINE_CARDS, "zb_h1"),
    Case("gemma-3", ENGINE_CARDS, "1f1b", chunks=2), Case("qwen3-vl-moe", ENGINE_CARDS, "zb_v", chunks=2),
)  # fmt: skip
"""Every family, schedule and machine; replicas, tensor parallelism."""
OFTEN = (CASES[0], CASES[-1])
"""Both machines; tensor parallelism, experts; a whole backward, and a split one with chunks."""
LOCAL, ENGINE = ("local", CARDS), ("engine", ENGINE_CARDS)
PAIRS = {f"{family}-{name}": (family, machine) for family in dict.fromkeys(case.family for case in CASES)
         for name, machine in (LOCAL, ENGINE)}  # fmt: skip
"""Of families and machines."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with the model of each."""
    demo, folders = tmp_path_factory.mktemp("demo"), {}
    tool("make_demo_data.py", "--output-dir", demo, "--samples", 12, "--heldout-samples", 4)
    for family in dict.fromkeys(case.family for case in CASES):
        folders[family] = tmp_path_factory.mktemp(family)
        build(family, demo, folders[family])
    return folders


@cache
def packed(folder: Path) -> Path:
    """The run folder of a family, with dataset and packs."""
    words = ("--model", folder / "model", "--input", folder / "demo/train.jsonl", "--run-dir", folder / "run")
    tool("launch.py", *words, "--from-scratch", "--analytic", "h100", "--nproc-per-node", 1, "--dry-run")
    return folder / "run"


def command(case: Case, folder: Path, run: Path) -> list[str]:
    model, pipeline = preset(str(folder / "model")), 2
    data, packs = packed(folder) / "data", packed(folder) / "packs-by-size"
    stages = pipeline * case.chunks
    cuts = tuple(len(model.chain) * (stage + 1) // stages for stage in range(stages - 1))
    plan = Plan.from_cuts(
        model.chain, cuts, model=model.name, model_hash=model.hash, schedule=case.schedule,
        virtual_pipeline_model_parallel_size=case.chunks,
    )  # fmt: skip
    plan.save(run / "plan.json")
    assert PackedIndex.open(packs).num_packs
    return [
        *("--model", str(folder / "model"), "--from-scratch", "--plan", str(run / "plan.json")),
        *("--data", str(data), "--packs", str(packs), "--lr", "1e-3", "--lr-decay-iters", "4"),
        *("--eval-data", str(data), "--eval-packs", str(packs), "--eval-interval", "2"),
        *("--pipeline-model-parallel-size", "2", "--train-iters", str(ENDS), "--global-batch-size", "4"),
        *("--log-interval", "1", "--save", str(run / "save"), "--save-interval", "2"),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        *("--metrics-file", str(run / "metrics.jsonl"), *case.flags),
    ]


def waits_of(said: str) -> list[dict[str, int]]:
    """Of each rank: what its host waited for, "OCCASION: PLACE, WHY", and how often."""
    return [json.loads(line.removeprefix("WAITS ")) for line in said.splitlines() if line.startswith("WAITS ")]


@pytest.mark.parametrize("case", short(CASES, OFTEN), ids=str)
def test_it_starts_trains_evaluates_saves_and_goes_on(case: Case, families: dict[str, Path], tmp_path: Path) -> None:
    folder = families[case.family]
    waits: Counter[str] = Counter()
    words = command(case, folder, tmp_path)
    for stop in (("--exit-interval", str(STOPS)), ()):
        said = run_ranks("cards.run", case.ranks, ["megatron.vlm.pretrain", *words, *stop], server=case.machine)
        for rank in waits_of(said):
            waits.update(rank)
    intervals = training_intervals(tmp_path / "metrics.jsonl")
    assert [interval["iteration"] for interval in intervals] == [1, 2, 3]
    assert all(interval["loss"] > 0 for interval in intervals)
    assert intervals[0]["loss"] > intervals[-1]["loss"]
    assert list(evaluations(tmp_path / "metrics.jsonl")) == [2, 3]
    check_waits(waits)


def check_waits(waits: Counter[str]) -> None:
    """None inside the schedule; beside starts, reports, evaluations and saves those alone that docs/gpu.md names."""
    named = (ROOT / "docs/gpu.md").read_text().partition("## What the host waits for")[2].partition("\n## ")[0]
    for wait in waits:
        occasion, _, where = wait.partition(": ")
        assert occasion != "schedule", wait
        function = where.partition(",")[0].rpartition(":")[2]
        if occasion in ("step", "iteration", "else"):
            assert f"`{function}`" in named, wait


def run_alone(machine: str, tool_name: str, *arguments: object) -> dict[str, Any]:
    said = run_ranks("cards.run", 1, [f"tools/{tool_name}", *map(str, arguments), "--json"], server=machine)
    (line,) = (line for line in said.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.parametrize("pair", short(("internvl3.5-local", "qwen3-vl-moe-engine"), ("internvl3.5-local",)))
def test_layers_are_measured(pair: str, families: dict[str, Path], tmp_path: Path) -> None:
    family, machine = PAIRS[pair]
    model, output = families[family] / "model", tmp_path / "profile.json"
    budgets = ("--vit-budget", 64 if family.startswith("qwen") else 4, "--llm-budget", 96)
    found = run_alone(machine, "profile_layers.py", "--model", model, *budgets, "--bf16", "--steps", 1,
                      "--output", output)  # fmt: skip
    assert found["device"] == "NVIDIA H100 80GB HBM3"
    assert found["dtype"] == "bfloat16"
    assert min(layer["forward_seconds"] for layer in found["layers"].values()) > 0


@pytest.mark.parametrize("pair", short(PAIRS, ("internvl3.5-local", "qwen3-vl-moe-engine")))
def test_converted_weights_are_checked_and_answer(pair: str, families: dict[str, Path], tmp_path: Path) -> None:
    family, machine = PAIRS[pair]
    folder, ours = families[family], tmp_path / "ours"
    found = run_alone(machine, "convert_checkpoint.py", "--from-hf", folder / "model", "--output-dir", ours, "--check")
    assert found["logit_difference"] < 1e-4
    if family == "internvl3.5":  # nothing is generated at native resolution
        words = ["tests/cards/answers.py", *map(str, (folder / "model", ours, packed(folder) / "data"))]
        assert "all answered" in run_ranks("cards.run", 1, words, server=machine)


@pytest.mark.long
@pytest.mark.parametrize("machine", [CARDS, ENGINE_CARDS], ids=["local", "engine"])
def test_every_part_of_the_verdict_runs(machine: str, tmp_path: Path) -> None:
    """Of `benchmarks/gpu.py`, all with small models: in one process but for what needs two ranks, or another number of
    hardware queues; each is within its limit but for seconds and bytes, which these cards do not have."""
    run_ranks("benchmarks.gpu_parts", 1, ("expected", str(tmp_path)))
    words = ["tests.unit.gpu_parts", str(tmp_path), str(tmp_path)]
    found = result_of(run_ranks("cards.run", 1, words, server=machine))
    assert found["said"] == []
    assert list(found["seconds"]) == [part for part in gpu.PARTS if part not in ("pipeline", "queues")]
    of_the_card = ("bytes", "parts of a step", "step", "bytes of a run")
    judged = {what: found for what, found in found["differences"].items() if what not in of_the_card}
    assert gpu.out_of_limits(judged) == []
    assert judged.keys() == gpu.LIMITS.keys() - {*of_the_card, "pipeline"}
    assert found["waits"] == {}
    assert {name.split()[0] for name in found["attention"]} == (
        {"transformer_engine", "variable_length"} if machine == ENGINE_CARDS else {"variable_length"}
    )
    for ranks, part in ((2, ("pipeline", str(tmp_path))), (1, ("queues",))):
        alone = result_of(run_ranks("cards.run", ranks, ["benchmarks.gpu_parts", *part], server=machine))
        assert alone
        if ranks > 1:
            assert max(alone.values()) < gpu.LIMITS["pipeline"]
