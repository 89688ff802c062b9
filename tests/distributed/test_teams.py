"""Packs that 1, 2 and 4 ranks run together, beside each other, give one process's loss and gradients."""

from pathlib import Path

import pytest

from tests.distributed.cases import TEAMS
from tests.distributed.conftest import run_program
from tests.distributed.test_parity import TOLERANCE
from tests.long import short_launches


@pytest.mark.parametrize("name", short_launches(TEAMS))
def test_packs_of_several_ranks_equal_one_process(answers: Path, name: str) -> None:
    launch = TEAMS[name]
    limit = ("--distributed-timeout-minutes", "7")
    result = run_program("tests.distributed.parity", launch.ranks, name, str(answers), *limit, server=launch.server)
    assert len(result) >= len(set(launch.cases()))
    wrong = {case: difference for case, difference in result.items() if not difference < TOLERANCE}
    assert not wrong
