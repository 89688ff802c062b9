"""Lock files (`flock`), so that two programs do not write to the same output; a lock file names its holder.

The system frees a lock when its process ends in any way. The last holder removes the lock file; a program that has
locked a removed one tries again. (The package filelock can neither share a lock among the nodes of a job nor name the
holder, and would replace a third of this file.)
"""

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from omnibal_ext.errors import UserError
from omnibal_ext.output import say
from omnibal_ext.reading.checks import anything, mapping, shown
from omnibal_ext.reading.document import read_json

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of file systems without locks. Nothing prevents two programs from writing one output there."""
PATIENCE_SECONDS = 10.0
"""How long to wait for another job that may be about to end."""
POLL_SECONDS = 0.2


def lock_of(output: Path) -> Path:
    """Return the path of an output's lock file: hidden, in the same folder."""
    return output.with_name(f".{output.name}.lock")


@contextmanager
def working_on(output: Path, exclusive: bool = True) -> Iterator[None]:
    """Hold the lock of `output` inside the block; first waits as long as another has it, with a line on stderr.

    `exclusive` False: others may share the lock. While this waited another program may have made the output.
    """
    path = lock_of(output)
    lock = _take(path, exclusive)
    if lock is None:
        say(f"waiting for {_holder(path)}, which works on {output}", error=True)
        lock = _until(lambda: _take(path, exclusive))
    assert lock is not None
    with _held(path, lock):
        yield


@contextmanager
def only_job(path: Path, what: str, job: str | None = None) -> Iterator[None]:
    """Hold the lock file `path` in the block. Raises UserError if another job has it for `PATIENCE_SECONDS` more.

    Programs of the same `job`, such as the launchers on its nodes, share the lock. `what`: what is locked, in words.
    """
    lock = _until(lambda: _take(path, exclusive=True, job=job) or _join(path, job), PATIENCE_SECONDS)
    if lock is None:
        raise UserError(f"{what}: in use by {_holder(path)}; wait until that has ended, or choose another folder")
    with _held(path, lock):
        yield


def _take(path: Path, exclusive: bool, job: str | None = None) -> FileIO | None:
    """Lock a file, write our name into it, and return it; None: another has it. Others of the `job` may `_join`."""
    lock = _locked(path, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
    if lock is not None:
        lock.truncate(0)
        signature = {"process": os.getpid(), "host": socket.gethostname(), "job": job}
        with suppress(OSError):  # a full disk: the lock works without the name too
            os.write(lock.fileno(), json.dumps(signature).encode())
        if job is not None:
            fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def _join(path: Path, job: str | None) -> FileIO | None:
    """Lock a file together with programs of the same job, and return it; None: no `job`, or another has the lock."""
    lock = _locked(path, fcntl.LOCK_SH) if job is not None else None
    if lock is not None and _signature(path).get("job") != job:
        lock.close()
        return None
    return lock


def _locked(path: Path, kind: int) -> FileIO | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # No link, behind which another file would be emptied, and no pipe, which would wait for a reader.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        lock = FileIO(os.open(path, flags, 0o666), "r+")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another folder") from None
    if not stat.S_ISREG(os.fstat(lock.fileno()).st_mode):
        lock.close()
        raise UserError(f"{path}: cannot be written (no regular file); choose another folder")
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
def _held(path: Path, lock: FileIO) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another program of the job holds it
            path.unlink()
        except OSError:
            pass
        lock.close()


def _is_removed(path: Path, lock: FileIO) -> bool:
    try:
        return not os.path.samestat(path.stat(), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return True


def _until(take: Callable[[], FileIO | None], seconds: float = float("inf")) -> FileIO | None:
    limit = time.monotonic() + seconds
    while (lock := take()) is None and time.monotonic() < limit:
        time.sleep(POLL_SECONDS)
    return lock


def _signature(path: Path) -> dict[str, object]:
    try:
        return read_json(path, mapping(anything), "wait")
    except UserError:  # being written, or removed
        return {}


def _holder(path: Path) -> str:
    found = _signature(path)
    known = {"process", "host"} <= found.keys()
    return f"process {shown(found['process'])} on {shown(found['host'])}" if known else "another program"
