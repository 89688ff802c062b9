"""metrics.jsonl is read as the run went: resumed, evaluated, while a line is being written."""

import json
from pathlib import Path

import pytest

from examples.demo.compare import final_loss, shown
from omnibal_ext.errors import UserError
from omnibal_ext.run_metrics import complete_lines, evaluations, profile_check, training_intervals


def test_what_ran_again_after_a_resume_counts_as_it_last_ran(tmp_path: Path) -> None:
    lines = [
        {"iteration": 1, "loss": 5.0}, {"iteration": 2, "loss": 4.0}, {"iteration": 2, "evaluation": {"loss": 4.5}},
        {"iteration": 3, "loss": 3.0},  # lost: the checkpoint was of iteration 1
        {"iteration": 2, "loss": 4.1}, {"iteration": 2, "evaluation": {"loss": 4.6}}, {"iteration": 3, "loss": 3.1},
    ]  # fmt: skip
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"iteration": 4, "lo')
    assert [(line["iteration"], line["loss"]) for line in training_intervals(path)] == [(1, 5.0), (2, 4.1), (3, 3.1)]
    assert evaluations(path) == {2: {"loss": 4.6}}


def test_what_a_run_found_of_its_profile_is_no_interval_and_counts_as_it_was_found_last(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    part = {"part": "llm", "phase": "forward", "profile_seconds": 1.0, "measured_seconds": 2.0}
    first, second = ({"model_hash": "m", "profile_hash": name, "iterations": [4], "parts": [part]} for name in "ab")
    lines = [{"iteration": 4, "profile_check": first}, {"iteration": 4, "loss": 1.0},
             {"iteration": 4, "profile_check": second}, {"iteration": 5, "loss": 0.5}]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert profile_check(path) == second
    assert [line["loss"] for line in training_intervals(path)] == [1.0, 0.5]
    path.write_text(json.dumps({"iteration": 4, "profile_check": {**first, "parts": [{**part, "part": 3}]}}) + "\n")
    with pytest.raises(UserError, match=r"line 1: profile_check.parts\[0\].part must be a text"):
        profile_check(path)
    path.write_text(json.dumps({"iteration": 5, "loss": 0.5}) + "\n")
    assert profile_check(path) is None


def test_a_run_that_has_not_reported_has_no_intervals(tmp_path: Path) -> None:
    assert training_intervals(tmp_path / "metrics.jsonl") == []
    assert evaluations(tmp_path / "metrics.jsonl") == {}


def test_a_whole_number_beyond_all_floats_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"iteration": 1, "loss": NaN}}\n{{"iteration": 2, "loss": {10**400}}}\n')
    with pytest.raises(UserError, match="line 2: loss must be a number"):
        training_intervals(tmp_path / "metrics.jsonl")


def test_a_line_is_counted_from_the_start_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "loss": 1.0}\n{"iteration": 2, "loss": 1.0}\n')
    _, position = complete_lines(path)
    with path.open("a") as file:
        file.write('{"iteration": 3, "loss": 1.0}\n{"iteration": 4, "loss": true}\n')
    with pytest.raises(UserError, match="line 4: loss must be"):
        complete_lines(path, position)


def test_the_final_loss_is_of_the_last_tenth() -> None:
    """80 samples before it, then 30 of loss 1, 10 of loss 3, and an interval of which every step was skipped."""
    rows = [(80, 80, 9.0), (95, 30, 1.0), (99, 10, 3.0), (100, 7, None)]
    lines = [{"iteration": iteration, "samples": samples, "loss": loss} for iteration, samples, loss in rows]
    assert final_loss(lines) == 1.5
    assert final_loss([{"iteration": 1, "samples": 4, "loss": None}]) is None


@pytest.mark.parametrize(
    ("loss", "said"), [(None, "none"), (float("inf"), "inf"), (float("nan"), "nan"), (2.5, "2.500")]
)
def test_a_loss_that_is_no_number_is_shown(loss: float | None, said: str) -> None:
    assert shown(loss) == said
