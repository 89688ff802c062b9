"""Megatron on one rank, for all tests of a file."""

from collections.abc import Iterator

import pytest

from megatron.vlm.arguments import TrainingInputs
from tests.unit.alone import megatron_alone


@pytest.fixture(scope="module")
def inputs() -> Iterator[TrainingInputs]:
    """Of the harness's small model."""
    with megatron_alone("small") as inputs:
        yield inputs
