"""Two programs never work where one must: a lock is waited for or refused, and is free once its holder has ended."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.files import locks
from omnibal_ext.files.locks import only_job, working_on

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
    assert ready.wait(20)
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
