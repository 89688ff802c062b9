"""No synchronisation anywhere hangs a schedule: over a transport as strict as NCCL all end, with the same gradients."""

from pathlib import Path

import pytest

from tests.distributed.cases import LAUNCHES
from tests.distributed.conftest import run_program


@pytest.mark.parametrize("name", ["pipeline", "long pipeline"])
def test_every_schedule_ends_with_the_gradients_of_one_process(answers: Path, name: str) -> None:
    result = run_program("tests.distributed.strict_transport", LAUNCHES[name].ranks, name, str(answers))
    assert len(result) == len(set(LAUNCHES[name].cases()))
    assert max(result.values()) < 1e-5
