"""Over a transport as strict as NCCL no synchronisation anywhere hangs a schedule, and one that hangs is found."""

import re
from pathlib import Path

import pytest

from tests.distributed.cases import SCHEDULES, STRICT
from tests.distributed.conftest import run_program
from tests.long import short_launches


@pytest.mark.parametrize("name", short_launches(STRICT))
def test_every_schedule_ends_with_the_gradients_of_one_process(answers: Path, name: str) -> None:
    cases = STRICT[name].cases()
    assert {(case.schedule, case.chunks) for case in cases} == set(SCHEDULES)
    assert {case.overlap for case in cases} == {False, True}
    assert {case.question.packs for case in cases} >= {"all", "text only", "one of many"}
    # Buckets of a few weights: several reductions a layer are under way.
    flags = ("--overlap-grad-reduce", "--ddp-bucket-size", "1000")
    program = "tests.distributed.strict_transport"
    result = run_program(program, STRICT[name].ranks, "parity", name, str(answers), *flags)
    assert len(result) == len(set(cases))
    assert max(result.values()) < 1e-5


def test_the_lines_of_a_hang_lead_to_the_rank_that_stands_still(tmp_path: Path) -> None:
    """That rank names its action and no message; each other one a message of a rank that is nearer to it. All are named
    with their hosts."""
    ranks = int(run_program("tests.distributed.standing", 3, str(tmp_path))["stood"])
    assert ranks == 3
    for stood in range(ranks):
        said = [(tmp_path / f"{stood}-{spoke}").read_text() for spoke in range(ranks)]
        for spoke, line in enumerate(said):
            assert re.fullmatch(rf"warning: rank {spoke} on host-{spoke} has been in [^\n]* for \d+ s\n", line), said
        assert said[stood].startswith(
            f"warning: rank {stood} on host-{stood} has been in the backward of microbatch 1, chunk 0 for "
        ), said
        for spoke in set(range(ranks)) - {stood}:
            waits = re.search(
                r", waiting for its (activation|gradient) (from|to reach) rank (\d+) on host-(\d+) for ", said[spoke]
            )
            assert waits, said
            assert waits[3] == waits[4]
            assert abs(int(waits[3]) - stood) < abs(spoke - stood), said
