"""What packs wider than a rank cannot be is refused in one line where a user meets it, with exit code 2."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.sampler import PackBatchSampler
from omnibal_ext.plan import Plan
from omnibal_ext.sizes import Sizes
from tests.programs import refusal, run_tool, tool

pytestmark = pytest.mark.starts
BUDGETS = ("--vit-budget", 0, "--llm-budget", 100)
RANKS = ("--data-parallel-size", 8, "--micro-batches", 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes of 60 samples, of which two take four ranks and one more than eight; packed for teams of four."""
    folder = tmp_path_factory.mktemp("refused")
    tokens = np.random.default_rng(0).integers(20, 90, 60)
    tokens[[7, 9]], tokens[40] = 390, 801
    Sizes.from_arrays(np.zeros(60, np.int64), tokens).save(folder / "sizes.npz")
    packed(folder, "packs", "--widths", "1,2,4")
    return folder


def packed(folder: Path, output: str, *flags: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Of a flag given twice the last counts."""
    sizes = ("--sizes", folder / "sizes.npz", "--output-dir", folder / output)
    return tool("pack_data.py", *sizes, *BUDGETS, *RANKS, *flags, check=check)


def test_packing_refuses_what_no_team_holds(folder: Path) -> None:
    line = refusal(packed(folder, "none", "--widths", "1,4", "--max-rejects", 0, check=False))
    for word in ("1 samples exceed 0 tiles and 400 tokens on 4 ranks", "sizes.npz, row 40", "limit 0 (--max-rejects)"):
        assert word in line
    assert not (folder / "none").exists()


@pytest.mark.parametrize(("node", "widest"), [(4, 4), (6, 1), (2, 1)])
def test_no_team_leaves_a_node_unless_it_is_asked_for(folder: Path, node: int, widest: int, tmp_path: Path) -> None:
    """What no team inside a node holds is left out, and written down with its place."""
    packed(folder, str(tmp_path / "auto"), "--widths", "auto", "--node-ranks", node)
    index = PackedIndex.open(tmp_path / "auto")
    assert index.widths[-1] == widest
    left = (tmp_path / "auto/rejected.jsonl").read_text()
    assert left.count("sizes.npz") == (1 if widest == 4 else 3)
    assert f'"row": {40 if widest == 4 else 7}' in left


def test_a_curriculum_is_no_evaluation_s(folder: Path, tmp_path: Path) -> None:
    """Nor does one that is packed again like another lose it."""
    widths = ("--widths", "1,2,4", "--held-out", 0.2, "--narrow-first", 1)
    packed(folder, str(tmp_path / "first"), *widths)
    for flag, kept in (("--like", 1), ("--held-out-of", None)):
        packed(folder, str(tmp_path / flag), flag, tmp_path / "first")
        assert PackedIndex.open(tmp_path / flag).manifest.get("narrow_first") == kept


def test_loops_of_others_and_tools_for_narrow_packs_refuse_wide_ones(folder: Path) -> None:
    line = refusal(run_tool("level_packs.py", folder / "packs", "--data-parallel-size", 4))
    assert "packs wider than a rank" in line
    script = folder / "loop.py"
    script.write_text(
        "import sys\nfrom omnibal_ext.errors import run_tool\n"
        f"from {PackBatchSampler.__module__} import PackBatchSampler\n"
        f"from {PackedIndex.__module__} import PackedIndex\n"
        "run_tool(lambda: print(len(PackBatchSampler(PackedIndex.open(sys.argv[1]), 8))))\n"
    )
    line = refusal(run_tool(str(script), folder / "packs"))
    assert "which only this project's trainer runs; pack without --widths" in line


def test_answers_are_given_by_one_process(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ("--model", "tiny", "--load", folder, "--data", folder, "--tokenizer-model", folder / "none")
    assert "torchrun has started 2: start it without torchrun" in refusal(
        run_tool("evaluate.py", *words, room="examples/demo")
    )


def test_the_planner_refuses_half_teams_and_a_tower_beside_wide_packs(folder: Path) -> None:
    """Sixteen seats an iteration are two ranks' eight packs each, which are no team of four."""
    planner = ("plan_layout.py", "--packs", folder / "packs", "--analytic", "h100", "--model", "tiny")
    planner += ("--budgets", "1x100", "--tensor-sizes", 1, "--output", folder / "plan.json")
    line = refusal(run_tool(*planner, "--num-microbatches", 8, "--pipeline-model-parallel-size", 1))
    assert "has packs of 4 ranks, which must divide the 2 data-parallel ranks: use other ranks" in line
    line = refusal(
        run_tool(*planner, "--num-microbatches", 4, "--pipeline-model-parallel-size", 2, "--tower", "beside")
    )
    assert "packs wider than a rank go with no tower beside the pipeline: --tower cut" in line
    tool(*planner, "--num-microbatches", 4, "--pipeline-model-parallel-size", 2, "--tower", "auto")
    assert Plan.load(folder / "plan.json").tower is None
