"""How much memory reading a stranger's file may take beyond what the process has, and beyond the file itself."""

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

MOST_BYTES = 2**29
"""512 MiB. Headers of a few bytes can ask for gigabytes."""
MOST_BEYOND = 400 * 2**20
"""Bytes that a reader of tables may take beyond the size of its file."""

_apart: set[int] = set()
"""Processes that read strangers' files and do nothing else: this one, or the one that forked it."""


@contextmanager
def limited_memory(most_bytes: int = MOST_BYTES) -> Iterator[None]:
    """Let this process take at most `most_bytes` more inside the block: asking for more fails, as on a full machine.

    Python raises MemoryError, libraries errors of their own. All threads are held to it: for programs that measure
    files, not for those that train.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (taken() + most_bytes, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def forking() -> Iterator[None]:
    """Keep a fork inside the block from collecting its parent's garbage: libraries' hooks behind a fork come before the
    fork's own first line. The fork calls `leave_garbage`."""
    collects = gc.isenabled()
    gc.disable()
    parent = os.getpid()
    try:
        yield
    finally:
        if collects and os.getpid() == parent:
            gc.enable()


def leave_garbage() -> None:
    """Leave what the parent no longer uses uncollected, in a forked process: ending an open film joins its decoder's
    threads, which a fork does not have."""
    gc.freeze()
    gc.enable()


def work_apart() -> None:
    """Say that this process reads strangers' files and does nothing else: `memory_beyond` limits only such ones."""
    _apart.add(os.getpid())


@contextmanager
def memory_beyond(size: int) -> Iterator[None]:
    """Limit memory to `size` and `MOST_BEYOND` bytes more, in a process that works apart (`work_apart`)."""
    if os.getpid() not in _apart:
        yield
        return
    with limited_memory(size + MOST_BEYOND):
        yield


class _Statm:
    """The file that says how much memory this process has, open: opening it costs more than reading it."""

    process = descriptor = -1


def taken() -> int:
    """Return the bytes of address space of this process."""
    if _Statm.process != os.getpid():  # a fork's is its parent's
        if _Statm.process >= 0:
            os.close(_Statm.descriptor)
        _Statm.descriptor, _Statm.process = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC), os.getpid()
    return int(os.pread(_Statm.descriptor, 64, 0).split()[0]) * resource.getpagesize()
