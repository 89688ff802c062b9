"""A run compares early iterations with its plan's profile, once: those behind the warm-up, the same on all ranks."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.vlm.monitoring.journal import Journal
from megatron.vlm.monitoring.recorder import Recorder
from megatron.vlm.monitoring.stage_meter import ProfileCheck
from omnibal_ext.costs.profile import Profile
from omnibal_ext.plan import Plan
from omnibal_ext.run_metrics import profile_check
from tests.unit.report.subjects import planned, ran


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, its profile, and a run in which all went as predicted: iterations 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("check")
    planned(folder, 200)
    return ran(folder)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)


def check_of(run: Path, metrics: Path) -> ProfileCheck:
    path = run.parent / "plan.json"
    return ProfileCheck(Plan.load(path), path, metrics, Journal(str(metrics)))


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("first", [1, 1001])
@pytest.mark.parametrize("recorded", [(), (5, 7), (4, 9), (20, 1001, 1008)])
def test_early_iterations_are_recorded(run: Path, tmp_path: Path, first: int, recorded: tuple[int, ...]) -> None:
    recorder = Recorder(tmp_path / "timeline.jsonl", recorded, check_of(run, tmp_path / "metrics.jsonl"))
    assert not recorder._records(0)
    chosen = [number for number in range(first, first + 30) if recorder._records(number)]
    early = {first + 3, first + 5, first + 7}
    assert {*chosen} == {number for number in recorded if first <= number < first + 30} | {
        number for number in early if not {number - 1, number + 1} & {*recorded}
    }
    assert all(other - one >= 2 for one, other in pairwise(chosen))


def test_it_is_said_once_and_written_for_replan(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = check_of(run, tmp_path / "metrics.jsonl")
    assert check.wants(4) is False
    check.first = 1
    lines = records(run)
    for lane in (lane for line in lines for lane in line["lanes"]):
        for action in lane["actions"]:
            action[5] = [[part, phase, seconds * (2 if part == "llm" else 1)] for part, phase, seconds in action[5]]
    early = {**lines[0], "iteration": 3}  # not behind those that warm up
    for line in (early, *lines, lines[0]):
        check.add(line)
    check.close()
    said = capsys.readouterr().out
    assert said.count("compared with the profile") == 1
    ratios = {words[0]: words[-1] for line in said.splitlines() if len(words := line.split()) > 2}
    assert (ratios["vit"], ratios["llm"], ratios["head"]) == ("1.00", "2.00", "1.00")
    assert "--replan" not in said  # the step itself took as long as planned
    found = profile_check(tmp_path / "metrics.jsonl")
    assert (found["iterations"], found["profile_hash"]) == ([4, 6, 8], check.plan.profile_hash)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    longer = [{**line, "lanes": [{**lane, "end": 1.06 * lane["end"]} for lane in line["lanes"]]} for line in lines]
    check = check_of(run, tmp_path / "metrics.jsonl")
    check.records = longer[:1]  # training has ended early
    check.close()
    said = capsys.readouterr().out
    assert "the step takes 1.06 x what the profile says" in said
    assert "omnibal launch again with --replan" in said


def test_with_the_profile_of_another_device_shares_are_compared(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CPU's milliseconds beside those of a GPU say nothing."""
    check, slower = check_of(run, tmp_path / "metrics.jsonl"), records(run)
    for lane in (lane for line in slower for lane in line["lanes"]):
        for action in lane["actions"]:
            action[3:5] = (500 * seconds for seconds in action[3:5])
            action[5] = [[part, phase, 500 * seconds] for part, phase, seconds in action[5]]
        lane["end"] *= 500
    check.records = [{**line, "device": "2 x Some CPU"} for line in slower]
    check.close()
    said = capsys.readouterr().out
    assert "compared with the profile, which is of another device (a100); percent of the step:" in said
    rows = {words[0]: words[1:] for line in said.splitlines() if len(words := line.split()) == 4}
    assert "whole step        100.00      100.00                1.00" in said
    assert {ratio for *_, ratio in rows.values()} == {"1.00"}
    assert "x what the profile says" not in said
    assert "to plan again from what this device measures" in said
    check = check_of(run, tmp_path / "metrics.jsonl")
    check.records = [{**line, "device": "NVIDIA A100-SXM4-80GB"} for line in slower]
    check.close()
    assert "the step takes 500.00 x what the profile says" in capsys.readouterr().out


def test_the_profile_is_the_plans_as_noted_or_beside_it_and_else_nothing_is_compared(run: Path, tmp_path: Path) -> None:
    folder, metrics = tmp_path / "plan", tmp_path / "run/metrics.jsonl"
    folder.mkdir()
    metrics.parent.mkdir()
    plan, profile = Plan.load(run.parent / "plan.json"), Profile.load(run.parent / "profile.json")
    check = ProfileCheck(plan, folder / "plan.json", metrics, Journal(str(metrics)))
    check.records = records(run)[:1]
    check.close()
    assert not metrics.exists()
    assert check._profile() is None
    replace(profile, action_seconds=1.0).save(folder / "profile.json")
    assert check._profile() is None, "another one"
    profile.save(folder / "profile.json")
    assert check._profile() == profile
    (folder / "profile.json").rename(tmp_path / "noted.json")
    (metrics.parent / "inputs.json").write_text(json.dumps({"profile": str(tmp_path / "noted.json")}))
    assert check._profile() == profile
    (metrics.parent / "inputs.json").write_text("{")
    assert check._profile() is None
