"""Packs that several ranks run together: resumed on half and twice the ranks, evaluated, killed, reported on."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.plan import Plan
from omnibal_ext.run_metrics import evaluations, training_intervals
from tests.endurance import kills
from tests.programs import refusal, run_alone, tool, warm_interpreter
from tests.system.test_training import make_dataset

pytestmark = pytest.mark.starts
TINY = preset("tiny")
BUDGETS = ("--vit-budget", 16, "--llm-budget", 56)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of which some take two ranks, packed for iterations of four seats; held-out ones, wide and not."""
    folder = tmp_path_factory.mktemp("wide")
    make_dataset(folder, samples=40)
    wide = (*BUDGETS, "--widths", "1,2", "--data-parallel-size", 2, "--micro-batches", 2, "--pipeline", 1)
    tool("pack_data.py", "--data", folder / "data", *wide, "--held-out", 0.3, "--output-dir", folder / "packs")
    held_out = ("--data", folder / "data", "--held-out-of", folder / "packs")
    tool("pack_data.py", *held_out, "--output-dir", folder / "wide")
    narrow = ("--vit-budget", 32, "--llm-budget", 112, "--widths", "1")
    tool("pack_data.py", *held_out, *narrow, "--output-dir", folder / "narrow")
    assert not (folder / "narrow/pack_widths.npy").exists()
    for name in ("packs", "wide"):
        assert set(np.load(folder / name / "pack_widths.npy")) == {1, 2}, name
    Plan.from_cuts(TINY.chain, (), model="tiny", model_hash=TINY.hash).save(folder / "plan.json")
    return folder


def train(
    folder: Path, run: str, ranks: int, iterations: int, held_out: str, *flags: object, packs: str = "packs"
) -> list[dict[str, Any]]:
    """Train on data-parallel ranks; the metrics of every iteration."""
    scratch = () if "--load" in flags else ("--from-scratch",)
    tool(
        "launch.py", "--preset", "tiny", "--data", folder / "data", "--packs", folder / packs, "--run-dir",
        folder / run, "--plan", folder / "plan.json", "--nproc-per-node", ranks, *scratch, "--eval-data",
        folder / "data", "--eval-packs", folder / held_out, "--", "--train-iters", iterations, "--lr", "1e-3",
        "--lr-decay-iters", 9, "--log-interval", 1, "--use-distributed-optimizer", "--save", folder / run / "saves",
        "--save-interval", iterations, "--eval-interval", iterations, *flags,
    )  # fmt: skip
    return training_intervals(folder / run / "metrics.jsonl")


def test_wide_packs_go_on_at_half_and_twice_the_ranks(folder: Path) -> None:
    """Inside an epoch on four ranks for two, and at its border on two for four; evaluations on one rank's packs and on
    two ranks' are one figure, and a report knows what ranks of a team have sent."""
    index = PackedIndex.open(folder / "packs")
    border = PackStream(index, 2, 2).first_iteration(1)
    assert border > 2
    end = border + 2
    whole = train(folder, "two", 2, end, "wide", "--save-interval", border - 1)
    inside = ("--load", folder / "two" / "saves")
    (folder / "two/saves/latest_checkpointed_iteration.txt").write_text(str(border - 1))
    four = train(folder, "four", 4, end, "narrow", *inside, "--save-interval", border)
    (folder / "four/saves/latest_checkpointed_iteration.txt").write_text(str(border))
    half = train(folder, "half", 2, end, "wide", "--load", folder / "four" / "saves")
    for run, first in ((four, border - 1), (half, border)):
        assert [line["iteration"] for line in run] == list(range(first + 1, end + 1))
        for line, expected in zip(run, whole[first:], strict=True):
            assert {name: line[name] for name in ("samples", "consumed_samples", "epoch")} == {
                name: expected[name] for name in ("samples", "consumed_samples", "epoch")
            }
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    losses = [evaluations(folder / run / "metrics.jsonl")[end]["loss"] for run in ("two", "four", "half")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    records = [json.loads(line) for line in (folder / "two/timeline.jsonl").read_text().splitlines()]
    lanes = [lane for record in records for lane in record["lanes"]]
    assert {pack[-1] for lane in lanes for pack in lane["packs"]} == {1, 2}
    phases = {
        phase for lane in lanes for *_, pieces in lane["actions"] for part, phase, _ in pieces if part == "exchange"
    }
    assert phases == {"forward", "backward"}


def test_a_run_on_narrow_packs_is_evaluated_on_wide_ones(folder: Path) -> None:
    """Teams are those of either index."""
    train(folder, "apart", 2, 1, "wide", packs="narrow")
    assert evaluations(folder / "apart/metrics.jsonl")[1]["loss"] > 0


def test_ranks_that_are_no_whole_teams_are_refused_by_launcher_and_trainer(folder: Path, tmp_path: Path) -> None:
    """Four seats an iteration are one rank's four packs, of which some need two ranks."""
    files = ("--preset", "tiny", "--data", folder / "data", "--packs", folder / "packs", "--plan", folder / "plan.json")
    flags = ("--train-iters", 1, "--lr", "1e-3")
    launched = tool("launch.py", *files, "--run-dir", tmp_path, "--from-scratch", "--", *flags, check=False)
    trained = run_alone("megatron.vlm.pretrain", *files, "--from-scratch", "--global-batch-size", 4, *flags)
    for done in (launched, trained):
        assert re.search("packs of 2 ranks, which.*use other ranks, or pack again", refusal(done))


@pytest.mark.long
def test_a_run_on_wide_packs_that_is_killed_ends_as_one_left_alone(tmp_path: Path) -> None:
    count = 4
    kills.prepare(tmp_path, warm_interpreter(), kills.WIDE)
    assert set(np.load(tmp_path / "packs/pack_widths.npy")) == {1, 2}
    said = kills.survive(tmp_path, kills=count, iterations=8, seed=2, python=warm_interpreter(), pipeline=1)
    assert said.startswith(f"{count} kills,")
