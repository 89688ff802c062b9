"""A run that was planned from a wrong profile says so by part of the model, and --replan mends profile and plan."""

import dataclasses
from pathlib import Path

import pytest

from omnibal_ext.costs.profile import Profile
from omnibal_ext.plan import Plan
from omnibal_ext.run_metrics import noted_inputs, profile_check, training_intervals
from tests.system.test_launch import launch
from tests.system.test_training import make_dataset, pack

WRONG = 6.0
"""By how much language layers are cheaper in the wrong profile: what other programs do to a run's seconds is less."""
SECONDS = ("forward_seconds", "backward_seconds", "forward_fit", "backward_fit", "recompute_seconds")
TRAIN = ("--", "--train-iters", 8, "--lr", "1e-3", "--log-interval", 4, "--save-interval", 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs, a profile, and one in which language layers cost less."""
    folder = tmp_path_factory.mktemp("replan")
    make_dataset(folder, samples=48)
    pack(folder, 4, "packs", 8, 128)
    launch(folder, "first", "--analytic", "a100", "--dry-run")
    profile = Profile.load(folder / "first/profile.json")
    llm = profile.layers["llm"]
    cheaper = {name: value for name in SECONDS if (value := getattr(llm, name)) is not None}
    cheaper = {name: tuple(one / WRONG for one in value) if isinstance(value, tuple) else value / WRONG
               for name, value in cheaper.items()}  # fmt: skip
    layers = {**profile.layers, "llm": dataclasses.replace(llm, **cheaper)}
    dataclasses.replace(profile, layers=layers).save(folder / "wrong.json")
    return folder


def ratio(run: Path, part: str) -> float:
    """Measured over the profile's seconds of a part of the model."""
    check = profile_check(run / "metrics.jsonl")
    assert check
    seconds = [(one["measured_seconds"], one["profile_seconds"]) for one in check["parts"] if one["part"] == part]
    return sum(measured for measured, _ in seconds) / sum(planned for _, planned in seconds)


def test_a_wrong_profile_is_said_by_part_and_replan_comes_to_the_cut_of_the_right_one(folder: Path) -> None:
    """Of two runs alike but for their profile: language layers are off by so much more in one, and planned again from
    what they measured both have one cut, give or take a layer."""
    cuts, ratios = {}, {}
    for run, profile in (("right", "first/profile.json"), ("wrong", "wrong.json")):
        flags = ("--profile", folder / profile)
        done = launch(folder, run, *flags, *TRAIN)
        assert "iterations 4, 6, 8 compared with the profile" in done.stdout
        assert "start omnibal launch again with --replan" in done.stdout
        before = Plan.load(folder / run / "plan.json")
        ratios[run] = ratio(folder / run, "llm") / ratio(folder / run, "vit")
        launch(folder, run, *flags, "--replan", "--dry-run", *TRAIN)
        after = Plan.load(folder / run / "plan.json")
        corrected = Profile.load(folder / run / "profile.corrected.json")
        assert corrected.corrected_by["profile_hash"] == before.profile_hash
        assert corrected.hash == after.profile_hash
        cuts[run] = before.stages[0].layers[1], after.stages[0].layers[1]
    assert 1.5 < ratios["wrong"] / ratios["right"] < WRONG**2, (
        "a busy machine measures roughly; unit tests hold the figure"
    )
    assert cuts["wrong"][0] < cuts["wrong"][1], "what was said to be cheap stood with all else"
    assert abs(cuts["wrong"][1] - cuts["right"][1]) <= 1


def test_the_run_goes_on_from_its_checkpoint_by_the_new_plan(folder: Path) -> None:
    """Started with the same flags and --replan; it measures again, against the corrected profile."""
    words = [word if word != 8 else 16 for word in TRAIN]
    launch(folder, "wrong", "--profile", folder / "wrong.json", "--replan", *words,
           "--override-opt_param-scheduler")  # fmt: skip
    assert [line["iteration"] for line in training_intervals(folder / "wrong/metrics.jsonl")] == [4, 8, 12, 16]
    check = profile_check(folder / "wrong/metrics.jsonl")
    assert check
    assert check["profile_hash"] == Profile.load(folder / "wrong/profile.corrected.json").hash
    assert min(check["iterations"]) >= 8 + 4
    noted = noted_inputs(folder / "wrong")
    assert noted["profile"] == str(folder / "wrong/profile.corrected.json")
