"""Any layout, schedule, recomputation and freeze gives the loss and the gradients of one process, to 1e-5 relative."""

from pathlib import Path

import pytest

from tests.distributed.cases import LAUNCHES
from tests.distributed.conftest import run_program

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_case_equals_one_process(answers: Path, name: str) -> None:
    launch = LAUNCHES[name]
    limit = ("--distributed-timeout-minutes", "7")  # of the pipeline's channels too
    result = run_program("tests.distributed.parity", launch.ranks, name, str(answers), *limit, server=launch.server)
    assert len(result) == len(set(LAUNCHES[name].cases()))
    wrong = {case: difference for case, difference in result.items() if not difference < TOLERANCE}
    assert not wrong


def test_a_wrong_weight_is_noticed(answers: Path) -> None:
    """The comparison itself can fail: other weights than the answers' give other gradients."""
    result = run_program("tests.distributed.parity", 1, "one rank", str(answers), "--seed", "8")
    changed = [difference for case, difference in result.items() if "image only" not in case]
    assert min(changed) > 100 * TOLERANCE
