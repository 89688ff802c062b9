"""One program at a time where two would spoil each other's work: `flock` on a file, which says who holds it.

The system frees a lock when the process that holds it ends, however it ends. A lock file is removed by its last holder;
who got hold of a removed one takes the next. (The package filelock knows neither a lock that the nodes of a job share
nor who holds one, and would replace a third of this file.)
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from omnibal_ext.errors import UserError
from omnibal_ext.output import say
from omnibal_ext.reading.checks import anything, mapping
from omnibal_ext.reading.document import read_json

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Of file systems that have none: there the user sees to it that programs do not meet."""
PATIENCE_SECONDS = 10.0
"""What a program that was stopped just now may need to end."""
POLL_SECONDS = 0.2


def lock_of(output: Path) -> Path:
    """The lock file beside what is being made, or written to."""
    return output.with_name(f".{output.name}.lock")


@contextmanager
def working_on(output: Path, alone: bool = True) -> Iterator[None]:
    """Hold the lock on what is being made at `output`, waiting for others; without `alone`, beside others of the kind.

    Who waited must look again at what is there. Waiting is said once on stderr.
    """
    path = lock_of(output)
    lock = _take(path, alone)
    if lock is None:
        say(f"waiting for {_holder(path)}, which works on {output}", error=True)
        lock = _until(lambda: _take(path, alone))
    assert lock is not None
    with _held(path, lock):
        yield


@contextmanager
def only_job(path: Path, what: str, job: str | None = None) -> Iterator[None]:
    """Hold the lock file `path` for a whole job. Raises UserError if another job has it and keeps it.

    Programs that give the same name of a job, such as the launchers of its nodes, hold it together.
    """
    lock = _until(lambda: _take(path, alone=True, job=job) or _join(path, job), PATIENCE_SECONDS)
    if lock is None:
        raise UserError(f"{what}: in use by {_holder(path)}; wait until that has ended, or choose another folder")
    with _held(path, lock):
        yield


def _take(path: Path, alone: bool, job: str | None = None) -> IO[str] | None:
    """The lock file, locked and signed, if nobody is in the way. A named job shares it."""
    lock = _locked(path, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
    if lock is not None:
        lock.truncate(0)
        with suppress(OSError):  # a full disk: a lock that nobody signed is one too
            os.write(lock.fileno(), json.dumps(_signed(job)).encode())
        if job is not None:
            fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _signed(job: str | None) -> dict[str, object]:
    return {"process": os.getpid(), "host": socket.gethostname(), "job": job}


def _join(path: Path, job: str | None) -> IO[str] | None:
    """The lock file, locked beside other holders of the same job, if these are who holds it."""
    lock = _locked(path, fcntl.LOCK_SH) if job is not None else None
    if lock is not None and _signature(path).get("job") != job:
        lock.close()
        return None
    return lock


def _locked(path: Path, kind: int) -> IO[str] | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another folder") from None
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            lock.close()
            if isinstance(error, BlockingIOError):
                return None
            raise
    if _is_removed(path, lock):
        lock.close()
        return _locked(path, kind)
    return lock


@contextmanager
def _held(path: Path, lock: IO[str]) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else holds it, nor will hold this one
            path.unlink()
        except OSError:
            pass
        lock.close()


def _is_removed(path: Path, lock: IO[str]) -> bool:
    try:
        return not os.path.samestat(path.stat(), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return True


def _until(take: Callable[[], IO[str] | None], seconds: float = float("inf")) -> IO[str] | None:
    limit = time.monotonic() + seconds
    while (lock := take()) is None and time.monotonic() < limit:
        time.sleep(POLL_SECONDS)
    return lock


def _signature(path: Path) -> dict[str, object]:
    try:
        return read_json(path, mapping(anything), "wait")
    except UserError:  # its holder is just signing, or gone
        return {}


def _holder(path: Path) -> str:
    found = _signature(path)
    known = {"process", "host"} <= found.keys()
    return f"process {found['process']} on {found['host']}" if known else "another program"
