"""Heads that no group size divides: the model with heads of zeros is the model without."""

from pathlib import Path

import pytest

from tests.distributed.conftest import run_program

pytestmark = pytest.mark.starts


def test_odd_heads_on_two_ranks_start_train_and_end_as_on_one(tmp_path: Path) -> None:
    answers = str(tmp_path / "answers.pt")
    run_program("tests.unit.models.odd_heads", 1, answers)
    found = run_program("tests.unit.models.odd_heads", 2, answers)
    assert found["start"] == 0, "what fills up is not zero, or changed what the true heads start from"
    assert found["losses"] < 1e-5
    assert found["weights"] < 1e-4  # Adam makes rounding of tiny gradients visible; what had learnt would be 4e-3 off
