"""Runs saved on a machine without GPUs go on with them, and the reverse: other kernels step, from the same state."""

from pathlib import Path
from typing import Any

import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.plan import Plan
from omnibal_ext.run_metrics import training_intervals
from tests.demo import demo_dataset, demo_packs
from tests.long import short
from tests.programs import CARDS, PLAIN, run_ranks

pytestmark = pytest.mark.starts
TINY = preset("tiny")
SHARDED = ("--use-distributed-optimizer",)
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumes")
    data = demo_dataset(folder / "demo", folder / "data", samples=40)
    demo_packs(data, folder / "packs", PackOptions(vit_budget=40, llm_budget=320, micro_batches=2))
    Plan.from_cuts(TINY.chain, (), model="tiny", model_hash=TINY.hash).save(folder / "plan.json")
    return folder


def train(folder: Path, run: str, machine: str, iterations: int, *flags: str) -> list[dict[str, Any]]:
    """On two ranks; the metrics of every iteration of this start."""
    metrics = folder / f"{run}.jsonl"
    command = ["--model", "tiny", "--plan", f"{folder}/plan.json", "--data", f"{folder}/data"]
    command += ["--packs", f"{folder}/packs", "--train-iters", str(iterations), "--lr", "1e-2", "--lr-decay-iters", "4"]
    command += ["--clip-grad", "0.5", "--weight-decay", "0.1", "--global-batch-size", "2", "--log-interval", "1"]
    command += ["--metrics-file", str(metrics), "--num-workers", "0", *flags]
    program, before = ("megatron.vlm.pretrain", []) if machine == PLAIN else ("cards.run", ["megatron.vlm.pretrain"])
    run_ranks(program, 2, [*before, *command], server=machine)
    return training_intervals(metrics)


WAYS = {
    "to GPUs, sharded": (PLAIN, CARDS, SHARDED), "from GPUs, sharded": (CARDS, PLAIN, SHARDED),
    "to GPUs, split": (PLAIN, CARDS, TENSOR), "from GPUs, split": (CARDS, PLAIN, (*TENSOR, *SHARDED)),
}  # fmt: skip


@pytest.mark.parametrize("way", short(WAYS, ["to GPUs, sharded", "from GPUs, split"]))
def test_a_run_goes_on_with_the_other_kernels(folder: Path, way: str) -> None:
    """To 1e-6: a count of steps that was lost, or taken from elsewhere, would show in the first step after."""
    first, then, flags = WAYS[way]
    name = f"{first[-5:]} {then[-5:]} {len(flags)}"
    saves = ("--save", str(folder / name), "--save-interval", "2", *flags)
    whole = train(folder, f"whole {name}", first, 4, "--from-scratch", *saves)
    (folder / name / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(folder, f"resumed {name}", then, 4, "--load", str(folder / name), *flags)
    assert [line["iteration"] for line in resumed] == [3, 4]
    for line, expected in zip(resumed, whole[2:], strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-6)
