"""Ranks of the tests: what they print comes back, and one that fails or hangs fails its test alone, saying why."""

import pytest

from tests.programs import run_ranks, run_tool

PROGRAM = "tests.distributed.trouble"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", r"rank 1 of .*: exit code 1\n(.|\n)*ValueError: rank 1 is at fault"),
        ("crash", r"rank 1 of .*: killed by signal 11"),
        ("hang", r"rank 1 of .*: still ran when its time was up\n(.|\n)*trouble.py\", line \d+ in main"),
    ],
)
def test_a_rank_in_trouble_is_named_with_what_it_said_and_the_next_program_runs(how: str, said: str) -> None:
    with pytest.raises(AssertionError, match=said) as failure:
        run_ranks(PROGRAM, 2, [how], time_limit=2.0)
    assert "rank 0 of tests.distributed.trouble: still ran when its time was up" in str(failure.value)
    assert sorted(run_ranks(PROGRAM, 2, ["well"]).splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_a_tool_ends_as_on_the_command_line() -> None:
    shown, wrong = run_tool("pack_data.py", "--help"), run_tool("pack_data.py", "--no-such-flag")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "--llm-budget" in shown.stdout
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: --no-such-flag: no such flag; see --help\n"
