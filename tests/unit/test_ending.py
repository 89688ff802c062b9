"""A rank ends with one line and the exit code of the reason; of several ranks one speaks."""

import json
import signal
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.programs import environment, warm_interpreter
from tests.waiting import PATIENCE

pytestmark = pytest.mark.starts
REFUSED = "raise UserError('x: too large; make it smaller')"
# Waits where no Python handler can run, as in a collective: a mutex of C's that is locked twice.
WAITS = (
    "import ctypes; print('ready', flush=True); mutex = ctypes.create_string_buffer(64); c = ctypes.CDLL(None); "
    "c.pthread_mutex_lock(mutex); c.pthread_mutex_lock(mutex)"
)
UNFINISHED = "from megatron.vlm.ending import UnfinishedError; raise UnfinishedError('after 3 of 8')"


def start(folder: Path, code: str, **variables: str) -> subprocess.Popen[str]:
    program = folder / f"rank{variables.get('RANK', '')}.py"  # one each: another may be reading its own
    program.write_text(f"""
from megatron.vlm.ending import run_rank
from omnibal_ext.errors import UserError
def main():
    {code}
run_rank(main)
""")
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [warm_interpreter(), program], env=environment(**variables), stdout=pipe, stderr=pipe, text=True
    )


def as_ranks_of_one_job(code: str, count: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Processes that torchrun could have started: they reach its store, kept by this process."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(STORE.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    where["TORCHELASTIC_RESTART_COUNT"] = folder.name  # a job of its own
    return [
        start(folder, code, RANK=str(rank), TORCHELASTIC_ERROR_FILE=str(folder / f"{rank}.json"), **where)
        for rank in range(count)
    ]


STORE = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def test_bad_input_is_said_by_one_rank_and_to_torchrun(tmp_path: Path) -> None:
    ranks = as_ranks_of_one_job(REFUSED, 2, tmp_path)
    said = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert sorted(said) == ["", "error: x: too large; make it smaller\n"]
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())["message"]
        assert told["message"] == "error: x: too large; make it smaller"
        assert int(told["extraInfo"]["timestamp"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)])
def test_a_signal_ends_waiting_ranks_with_one_line(tmp_path: Path, number: signal.Signals, code: int) -> None:
    ranks = as_ranks_of_one_job(WAITS, 2, tmp_path)
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        rank.send_signal(number)
    said = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [code, code]
    silent, line = sorted(said)
    assert silent == ""
    assert line.startswith(f"stopped by {signal.Signals(code - 128).name}")
    assert line.count("\n") == 1


def test_our_own_fault_keeps_its_traceback(tmp_path: Path) -> None:
    rank = start(tmp_path, "raise ValueError('ours')")
    _, said = rank.communicate(timeout=PATIENCE)
    assert rank.returncode == 1
    assert "Traceback" in said
    assert "ValueError: ours" in said


@pytest.mark.parametrize(
    ("code", "number", "line"),
    [
        ("import sys; sys.exit()", 1, "error: Megatron ended the run without an exit code; why, if it has said so, is"),
        ("exit()", 1, "error: Megatron ended the run without an exit code"), (UNFINISHED, 1, "error: after 3 of 8"),
        ("import sys; sys.exit(0)", 0, ""), ("import sys; sys.exit(3)", 3, ""),
    ],
)  # fmt: skip
def test_a_run_that_stops_early_for_no_reason_has_failed(tmp_path: Path, code: str, number: int, line: str) -> None:
    ranks = as_ranks_of_one_job(code, 2, tmp_path)
    said = sorted(rank.communicate(timeout=PATIENCE)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [number, number]
    assert said[0] == ""
    assert said[1].startswith(line)
    assert said[1].count("\n") == bool(line)


def test_a_signal_that_someone_else_handles_is_theirs(tmp_path: Path) -> None:
    """As Megatron's --exit-signal-handler does, which saves a checkpoint first."""
    code = "import os, signal, time; signal.signal(signal.SIGTERM, lambda *_: print('saving'))"
    rank = start(tmp_path, f"{code}; os.kill(os.getpid(), signal.SIGTERM); time.sleep(1); print('done')")
    out, said = rank.communicate(timeout=PATIENCE)
    assert (rank.returncode, out, said) == (0, "saving\ndone\n", "")
