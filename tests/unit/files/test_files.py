"""What a run appends to its files: a disk without room takes nothing else along. Two programs never work where one
must: a lock is waited for or refused, and is free once its holder has ended.
"""

import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron.vlm.monitoring.journal import survive_write_errors
from omnibal_ext.errors import UserError
from omnibal_ext.files import locks
from omnibal_ext.files.locks import only_job, working_on
from omnibal_ext.files.records import JsonLines, write_record
from omnibal_ext.run_metrics import complete_lines
from tests.waiting import PATIENCE


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file may be larger: writing on then fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def iterations(path: Path) -> list[int]:
    return [line["iteration"] for line in complete_lines(path)[0]]


def test_a_full_disk_loses_lines_and_keeps_whole_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run/metrics.jsonl"
    lines = JsonLines(path)
    lines.append({"iteration": 1})
    with room(path.stat().st_size + 7):
        for number in (2, 3):
            lines.append({"iteration": number})
        assert path.read_bytes().endswith(b"\n")
    lines.append({"iteration": 4})
    assert iterations(path) == [1, 4]
    (warning,) = capsys.readouterr().out.splitlines()
    assert warning == f"warning: {path}: cannot be written (File too large); training goes on without it"
    with room(path.stat().st_size):
        lines.append({"iteration": 5})
    assert len(capsys.readouterr().out.splitlines()) == 1  # it had been well in between


@pytest.mark.parametrize("length", [3, 2**16 - 1, 2**16, 200_000])
def test_half_a_line_of_before_is_taken_out(tmp_path: Path, length: int) -> None:
    path = tmp_path / "metrics.jsonl"
    for whole in ('{"iteration": 1}\n', ""):
        path.write_text(whole + "x" * length)
        JsonLines(path).append({"iteration": 2})
        assert path.read_text() == whole + '{"iteration": 2}\n'


def test_a_place_that_cannot_be_written_to_is_no_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    JsonLines(tmp_path / "file/metrics.jsonl").append({})
    JsonLines(tmp_path).append({})
    assert capsys.readouterr().out.count("warning: ") == 2


def test_curves_end_at_a_full_disk_and_training_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer").RecordWriter
    for name in ("write", "flush", "close"):
        monkeypatch.setattr(record_writer, name, getattr(record_writer, name))  # and put back
    from torch.utils.tensorboard import SummaryWriter

    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    survive_write_errors()
    with room(3000):
        writer = SummaryWriter(str(tmp_path), max_queue=1)
        for number in range(300):
            writer.add_scalar("loss", 1.0, number)
            writer.flush()
        writer.close()
    assert not raised
    assert capsys.readouterr().out.count("TensorBoard's curves cannot be written (File too large)") == 1
    assert 0 < next(tmp_path.iterdir()).stat().st_size <= 3000


def test_a_record_that_cannot_be_written_is_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").mkdir()
    with pytest.raises(UserError, match=r"inputs.json: Is a directory; choose another path, or fix what is there"):
        write_record(tmp_path / "inputs.json", {})
    with room(10), pytest.raises(UserError, match=r"plan.json: File too large; make room and start again"):
        write_record(tmp_path / "plan.json", {"a": "b" * 100})
    (tmp_path / "inputs.json/x").touch()
    with pytest.raises(UserError, match=r"inputs.json/x: (Not a directory|File exists)"):
        write_record(tmp_path / "inputs.json/x/y", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs.json"]


FORK = multiprocessing.get_context("fork")


@contextmanager
def elsewhere(hold: Callable[[], Any]) -> Iterator[Any]:
    """Another process that holds a lock until it is killed."""
    ready = FORK.Event()

    def work() -> None:
        with hold():
            ready.set()
            time.sleep(60)

    process = FORK.Process(target=work)
    process.start()
    assert ready.wait(PATIENCE)
    yield process
    process.kill()
    process.join()


def test_a_run_folder_in_use_is_refused_by_who_uses_it_and_free_once_that_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "PATIENCE_SECONDS", 0.3)
    path = tmp_path / "run" / ".lock"
    with elsewhere(lambda: only_job(path, "run")) as other:
        with pytest.raises(UserError, match=rf"run: in use by process {other.pid} on .*; wait until that has ended"):
            only_job(path, "run").__enter__()
        os.kill(other.pid, signal.SIGKILL)
        monkeypatch.setattr(locks, "PATIENCE_SECONDS", 20.0)
        with only_job(path, "run"):  # its holder is given the time to end
            assert path.exists()
    assert not path.exists()


def test_launchers_of_one_job_share_a_folder_and_another_job_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "PATIENCE_SECONDS", 0.3)
    path = tmp_path / ".lock"
    with elsewhere(lambda: only_job(path, "run", "job 7")):
        with only_job(path, "run", "job 7"):
            for stranger in ("job 8", None):
                with pytest.raises(UserError, match="in use"):
                    only_job(path, "run", stranger).__enter__()
        assert path.exists()  # the other holds it still
        with pytest.raises(UserError, match="in use"):
            only_job(path, "run", "job 8").__enter__()


def test_who_waits_for_a_lock_says_so_once_and_gets_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "dataset"
    with elsewhere(lambda: working_on(output)) as other:
        end = threading.Timer(0.8, other.kill)
        end.start()
        with working_on(output):
            assert end.finished.is_set()
    assert capsys.readouterr().err.startswith(f"waiting for process {other.pid} on ")
    with working_on(output):
        assert capsys.readouterr().err == ""
    assert list(tmp_path.iterdir()) == []


def test_work_that_goes_together_waits_only_for_work_that_does_not(tmp_path: Path) -> None:
    output = tmp_path / "dataset"
    with elsewhere(lambda: working_on(output, exclusive=False)):
        with working_on(output, exclusive=False):
            pass
        alone = FORK.Process(target=lambda: working_on(output).__enter__())
        alone.start()
        alone.join(1.0)
        assert alone.is_alive()
        alone.kill()
        alone.join()


def test_many_at_once_are_one_after_the_other(tmp_path: Path) -> None:
    """Also where the lock file goes and comes between them."""

    def work() -> None:
        for _ in range(20):
            with working_on(tmp_path / "sum"):
                number = int((tmp_path / "sum").read_text())
                time.sleep(0.001)
                (tmp_path / "sum").write_text(str(number + 1))

    (tmp_path / "sum").write_text("0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locks, "POLL_SECONDS", 0.001)
        workers = [FORK.Process(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert (tmp_path / "sum").read_text() == "80"


def test_who_gets_hold_of_a_removed_lock_file_takes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock, calls = tmp_path / ".lock", locks.fcntl.flock, []

    def removed_meanwhile(file: Any, kind: int) -> None:
        flock(file, kind)
        calls.append(kind)
        if len(calls) == 1:
            path.unlink()

    monkeypatch.setattr(locks.fcntl, "flock", removed_meanwhile)
    with only_job(path, "run"):
        assert path.exists()
