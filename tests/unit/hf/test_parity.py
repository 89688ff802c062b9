"""Logits, loss and gradients of every family are those of transformers; a pack gives what its samples give alone."""

import pytest

from tests.distributed.conftest import run_program
from tests.programs import ENGINE, PLAIN
from tests.unit.hf.models import FAMILIES

pytest.importorskip("transformers")
pytestmark = pytest.mark.starts
TOLERANCE = 2e-5  # seen: 2e-6


WAYS = {
    "one rank": (1, PLAIN),
    "two tensor-parallel ranks": (2, PLAIN),
    "two tensor-parallel ranks, Transformer Engine": (2, ENGINE),
}


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def differences(request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    ranks, server = request.param
    return run_program("tests.unit.hf.parity", ranks, server=server)  # all families: Megatron starts once


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_equals_transformers(differences: dict[str, dict[str, float]], family: str) -> None:
    found = differences[family]
    assert found["scale"] > 1, "logits so small that any model would pass"
    assert found["logits"] < TOLERANCE
    assert found["loss"] < TOLERANCE
    assert found["gradients"] < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_weights_go_back_bit_by_bit(differences: dict[str, dict[str, float]], family: str) -> None:
    """Read by Megatron at this tensor-parallel size, saved by it, exported: names, files and bits are the same."""
    assert not differences[family]["bits lost"]
