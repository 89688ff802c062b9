"""Tables of our programs fit 80 and 120 columns, and break neither a number nor a path."""

import json

import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.console import print_table
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.launch.check import Report
from omnibal_ext.layout.command import print_plan
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import find_layouts, make_plan
from tools import profile_layers

WIDTHS = pytest.mark.parametrize("width", [80, 120])
PATH = "/a/long/path/of/somebody/run"


@pytest.fixture(autouse=True)
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(request.getfixturevalue("width")))


def lines(capsys: pytest.CaptureFixture[str], width: int) -> list[str]:
    found = capsys.readouterr().out.splitlines()
    tables = [line for line in found if line.startswith("  ") or set(line.strip()) == {"─"}]
    assert tables
    assert max(len(line.rstrip()) for line in tables) <= width
    return tables


@WIDTHS
def test_those_of_profiles_and_plans(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    profile = analytic_profile(preset("internvl-chat-1.5"), "h100", {"tiles": 9, "tokens": 4096}, 4)
    profile_layers._show(profile, f"{PATH}/profile.json")
    shown = lines(capsys, width)
    costs = [line for line in shown if line.strip().startswith(("vit ", "llm "))]
    assert len([line for line in costs if "at most" not in line]) == 2
    problem = LayoutProblem(profile, 4, 8, 1, "1f1b", 70 * 2**30)
    plan = make_plan(problem, find_layouts(problem, "profile"), "profile")
    print_plan(plan)
    shown = lines(capsys, width)
    assert len([line for line in shown if line.strip().startswith("rank ")]) == 4


@WIDTHS
def test_that_of_the_checks(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    detail = f"first weights from {PATH}, to be converted; 1 x 1.83 MiB in {PATH}/checkpoints, 31.02 GiB free"
    Report([{"check": "checkpoints", "state": "refused", "detail": detail}], None, 1.0).print()
    shown = " ".join(lines(capsys, width)).split()
    assert {f"{PATH},", f"{PATH}/checkpoints,", "1.83", "31.02"} <= {*shown}


@WIDTHS
def test_that_of_a_dataset(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Dataset", ("", "count"), [("samples", "1,234,567,890"), (f"rejected, see {PATH}/rejected.jsonl", "7")])
    shown = lines(capsys, width)
    assert f"{PATH}/rejected.jsonl" in json.dumps(shown)
    assert any(line.rstrip().endswith("1,234,567,890") for line in shown)
