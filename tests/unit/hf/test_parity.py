"""Logits, loss and gradients of every family are those of transformers; a pack gives what its samples give alone."""

import pytest

from tests.distributed.conftest import run_program
from tests.unit.hf.models import FAMILIES

pytest.importorskip("transformers")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def differences() -> dict[str, dict[str, float]]:
    return run_program("tests.unit.hf.parity", 1)  # one process for all: Megatron starts once


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_transformers(differences: dict[str, dict[str, float]], family: str) -> None:
    found = differences[family]
    assert found["scale"] > 1, "logits so small that any model would pass"
    assert found["logits"] < TOLERANCE
    assert found["loss"] < TOLERANCE
    assert found["gradients"] < TOLERANCE
