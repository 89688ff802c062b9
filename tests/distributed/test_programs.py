"""Ranks of the tests: what they print comes back, and one that fails or hangs fails its test alone, saying why."""

from pathlib import Path

import pytest

from tests.programs import PLAIN, fork_server, run_ranks, run_tool, tool
from tests.slurm_cluster import until

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


def test_a_server_is_one_for_all_who_name_its_owner_and_ends_with_it(tmp_path: Path) -> None:
    """And kills what it runs; the owner is a fork that has started one of its own."""
    program = tmp_path / "owner.py"
    program.write_text(
        "import os; from tests import programs; programs.owner = os.getpid()\n"
        "path = programs.fork_server(programs.PLAIN)\n"
        "programs.fork_server.cache_clear(); assert programs.fork_server(programs.PLAIN) == path\n"
        "asked = programs.ask(str(path), 'tests.distributed.trouble', ['hang'], programs.environment(RANK='0', "
        "WORLD_SIZE='1', MASTER_ADDR='localhost', MASTER_PORT='1'))\n"
        "print(path, flush=True)"
    )
    path = Path(tool(str(program)).stdout.strip())
    assert path.name.startswith("warm-python-")
    assert path != fork_server(PLAIN)
    until(lambda: not path.exists(), 20)
    assert fork_server(PLAIN).exists()


def test_a_tool_ends_as_on_the_command_line() -> None:
    shown, wrong = run_tool("pack_data.py", "--help"), run_tool("pack_data.py", "--no-such-flag")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "--llm-budget" in shown.stdout
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: --no-such-flag: no such flag; see --help\n"
