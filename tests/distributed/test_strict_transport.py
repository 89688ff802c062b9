"""No synchronisation anywhere hangs a schedule: over a transport as strict as NCCL all end, with the same gradients."""

from pathlib import Path

import pytest

from tests.distributed.cases import SCHEDULES, STRICT
from tests.distributed.conftest import run_program


@pytest.mark.parametrize("name", STRICT)
def test_every_schedule_ends_with_the_gradients_of_one_process(answers: Path, name: str) -> None:
    cases = STRICT[name].cases()
    assert {(case.schedule, case.chunks) for case in cases} == set(SCHEDULES)
    assert {case.overlap for case in cases} == {False, True}
    assert {case.question.packs for case in cases} >= {"all", "text only", "one of many"}
    # Buckets of a few weights: several reductions a link are under way.
    flags = ("--ddp-bucket-size", "1000")
    program = "tests.distributed.strict_transport"
    result = run_program(program, STRICT[name].ranks, "parity", name, str(answers), *flags)
    assert len(result) == len(set(cases))
    assert max(result.values()) < 1e-5
