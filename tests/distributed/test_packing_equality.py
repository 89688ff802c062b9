"""Packing changes nothing: not the neighbours in a pack, not the padding behind a sample."""

from tests.distributed.conftest import run_program


def test_packed_equals_unpacked_sample_by_sample() -> None:
    result = run_program("tests.distributed.packing_equality", 1)
    assert result["packed"] < 1e-5
    assert result["padded"] < 1e-5
