"""Recomputation draws the same dropout a second time."""

from tests.distributed.conftest import run_program


def test_recomputing_draws_the_same_dropout() -> None:
    result = run_program("tests.distributed.dropout", 1)
    assert result.pop("other seed") > 0.1  # there is dropout
    assert max(result.values()) < 1e-6
