"""Dropout under recomputation, tensor and sequence parallelism: drawn alike where it must be, and nowhere else."""

from tests.distributed.conftest import run_program


def test_recomputing_draws_the_same_dropout() -> None:
    result = run_program("tests.distributed.dropout", 1)
    assert result.pop("other seed") > 0.1  # there is dropout
    assert max(result.values()) < 1e-6


def test_masks_are_alike_on_ranks_that_hold_the_same_and_differ_on_others() -> None:
    result = run_program("tests.distributed.masks", 2)
    assert len(result) == 6 * 5 + 1
    assert {what: share for what, share in result.items() if share} == {}
