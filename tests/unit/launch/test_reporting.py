"""What a run notes for those who read its folder later."""

import json
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from omnibal_ext.launch.planning import Planning
from omnibal_ext.launch.reporting import note_inputs, write_report


def planning(folder: Path, **flags: str) -> Planning:
    given: dict[str, Any] = {"run_dir": str(folder / "run"), "plan": None, "profile": None, **flags}
    index = Namespace(folder=folder / "packs")
    return Planning(Namespace(**given), Namespace(), None, index, 1, 1, Path("tools"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "profile"),
    [({}, "run/profile.json"), ({"plan": "R/plan.json"}, "R/profile.json"),
     ({"plan": "R/plan.json", "profile": "other.json"}, "other.json")],
    ids=["its own", "a plan given", "both given"],
)  # fmt: skip
def test_the_profile_noted_is_that_of_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: dict[str, str], profile: str
) -> None:
    (tmp_path / "run").mkdir()
    start = planning(tmp_path, **{name: str(tmp_path / value) for name, value in flags.items()})
    note_inputs(start, ["--metrics-file", str(tmp_path / "m.jsonl")], {"flags": {"model": "tiny"}})
    noted = json.loads((tmp_path / "run/inputs.json").read_text())
    paths = {"plan": flags.get("plan", "run/plan.json"), "profile": profile, "packs": "packs", "metrics": "m.jsonl"}
    assert {name: noted[name] for name in paths} == {name: str(tmp_path / path) for name, path in paths.items()}
    assert f"megatron-core {version('megatron-core')}" in noted["versions"]
    write_report(Path("tools/report.py"), start, quiet=False)
    assert f"no report: {tmp_path / profile} is not there" in capsys.readouterr().out
