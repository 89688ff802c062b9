"""--replan takes the seconds of the run in the folder, for the profile that this run was planned from, or nothing;
what a run notes for those who read its folder later."""

import json
from argparse import Namespace
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from megatron.vlm.preflight.saving import check_run_folder
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.launch.planning import Planning
from omnibal_ext.launch.recipe import with_recipe
from omnibal_ext.launch.replanning import corrected_profile
from omnibal_ext.launch.reporting import note_inputs, write_report
from omnibal_ext.run_metrics import noted_inputs
from tests.unit.layout.instances import make_profile

MODEL = "aa"


def planning(folder: Path, model: str = MODEL, index: Any = None, **flags: Any) -> Planning:
    given = {"run_dir": str(folder), "plan": None, "profile": None, "check": False, "json": False, **flags}
    model_of_run: Any = Namespace(name="tiny", hash=model, was_noted=lambda name, noted: noted == model)
    return Planning(Namespace(**given), Namespace(), model_of_run, index, 1, 1, Path("tools"))


def measured(folder: Path, profile: Profile, ratio: float) -> None:
    """One more start of the run: language layers took `ratio` times what the profile says, forwards and backwards."""
    parts = [{"part": "llm", "phase": phase, "profile_seconds": 1.0, "measured_seconds": ratio}
             for phase in ("forward", "backward")]  # fmt: skip
    check = {"model_hash": MODEL, "profile_hash": profile.hash, "iterations": [4, 6, 8], "parts": parts}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 8, "profile_check": check}) + "\n")


def llm_seconds(path: Path) -> float:
    return Profile.load(path).layers["llm"].forward_seconds


def test_it_is_corrected_by_the_last_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = make_profile()
    profile.save(tmp_path / "profile.json")
    measured(tmp_path, profile, 7.0)
    measured(tmp_path, profile, 2.0)
    path = corrected_profile(planning(tmp_path))
    assert llm_seconds(path) == 2 * profile.layers["llm"].forward_seconds
    by = {"profile_hash": profile.hash, "iterations": [4, 6, 8]}
    assert Profile.load(path).corrected_by == by
    assert f"--profile {path}" in capsys.readouterr().out
    assert Profile.load(tmp_path / "profile.json") == profile, "the other one stays"


def test_started_again_it_keeps_to_it_until_more_was_measured(tmp_path: Path) -> None:
    """Before the next measurement, also where the figures were put aside; behind it the corrected one is corrected."""
    profile, metrics = make_profile(), tmp_path / "metrics.jsonl"
    profile.save(tmp_path / "profile.json")
    measured(tmp_path, profile, 2.0)
    path, before = corrected_profile(planning(tmp_path)), metrics.read_text()
    first = path.read_text()
    assert corrected_profile(planning(tmp_path)).read_text() == first
    metrics.write_text('{"iteration": 1, "loss": 2.0}\n')
    assert corrected_profile(planning(tmp_path)).read_text() == first
    metrics.write_text(before)
    measured(tmp_path, Profile.load(path), 1.5)
    for _ in range(2):
        assert llm_seconds(corrected_profile(planning(tmp_path))) == 3 * profile.layers["llm"].forward_seconds


def test_a_check_writes_nothing(tmp_path: Path) -> None:
    profile = make_profile()
    profile.save(tmp_path / "given.json")
    measured(tmp_path, profile, 2.0)
    given = tmp_path / "given.json"
    assert corrected_profile(planning(tmp_path, profile=str(given), check=True)) == given
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given.json", "metrics.jsonl"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no run", "has nothing measured by part of the model, which a run writes after its eighth iteration"),
        ("too short", "has nothing measured by part of the model"),
        ("another model", r"was of another model \(hash aa\) than 'tiny' \(hash bb\); give its --model"),
        ("another profile", r"is not the one that the run in .* was planned from \(hash .*\); give that one by"),
        ("no profile", "profile.json is not the one that the run in"),
    ],
)
def test_what_cannot_be_planned_again_is_refused(tmp_path: Path, case: str, message: str) -> None:
    profile = make_profile()
    if case == "too short":
        (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 2.0}\n')
    elif case != "no run":
        measured(tmp_path, profile, 2.0)
    if case != "no profile":
        (replace(profile, action_seconds=1.0) if case == "another profile" else profile).save(tmp_path / "profile.json")
    with pytest.raises(UserError, match=message):
        corrected_profile(planning(tmp_path, "bb" if case == "another model" else MODEL))
    assert not (tmp_path / "profile.corrected.json").exists()


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
    given = {name: str(tmp_path / value) for name, value in flags.items()}
    start = planning(tmp_path / "run", index=Namespace(folder=tmp_path / "packs"), **given)
    note_inputs(start, ["--metrics-file", str(tmp_path / "m.jsonl")], {"flags": {"model": "tiny"}})
    noted = noted_inputs(tmp_path / "run")
    paths = {"plan": flags.get("plan", "run/plan.json"), "profile": profile, "packs": "packs", "metrics": "m.jsonl"}
    assert {name: noted[name] for name in paths} == {name: str(tmp_path / path) for name, path in paths.items()}
    assert f"megatron-core {version('megatron-core')}" in noted["versions"]
    write_report(Path("tools/report.py"), start, quiet=False)
    assert f"no report: {tmp_path / profile} is not there" in capsys.readouterr().out


def test_a_run_s_note_is_not_believed_when_damaged_and_is_when_edited(tmp_path: Path) -> None:
    note_inputs(planning(tmp_path, index=Namespace(folder=tmp_path)), [], {"flags": {"model": "tiny"}})
    path = tmp_path / "inputs.json"
    path.write_text(path.read_text().replace("tiny", "tinx"))
    checks = Namespace(metrics_file=None, tensorboard_dir=None, save=None)
    for read in (noted_inputs, lambda run: with_recipe(["--config", str(run / "inputs.json")]),
                 lambda run: check_run_folder(checks, run)):  # fmt: skip
        with pytest.raises(UserError, match=f"{path}: .*changed by hand; if you edited it take manifest_hash out"):
            read(tmp_path)
    edited = {name: value for name, value in json.loads(path.read_text()).items() if name != "manifest_hash"}
    path.write_text(json.dumps(edited))
    assert with_recipe(["--config", str(path)]) == ["--model", "tinx"]
