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
    """Limit the memory that this process may take inside the block to `most_bytes` more: then it is refused.

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
    """Turn off garbage collection while the block forks: a fork must not collect its parent's objects, also not in
    libraries' hooks, which run before its own first line. It then calls `leave_garbage`."""
    collects = gc.isenabled()
    gc.disable()
    parent = os.getpid()
    try:
        yield
    finally:
        if collects and os.getpid() == parent:
            gc.enable()


def leave_garbage() -> None:
    """Turn garbage collection on in a forked process, without its parent's objects: closing an open film would wait for
    its decoder's threads, which a fork does not have."""
    gc.freeze()
    gc.enable()


def work_apart() -> None:
    """Mark this process as one that only reads strangers' files: `memory_beyond` limits such processes alone."""
    _apart.add(os.getpid())


@contextmanager
def memory_beyond(size: int) -> Iterator[None]:
    """Limit memory in the block to `size` and `MOST_BEYOND` bytes more, if this process is marked (`work_apart`)."""
    if os.getpid() not in _apart:
        yield
        return
    with limited_memory(size + MOST_BEYOND):
        yield


class _Statm:
    """The open file in /proc that says how much memory this process has: opening it costs more than reading it."""

    process = descriptor = -1


def taken() -> int:
    """Return how many bytes of address space this process has."""
    if _Statm.process != os.getpid():  # a fork's is its parent's
        if _Statm.process >= 0:
            os.close(_Statm.descriptor)
        _Statm.descriptor, _Statm.process = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC), os.getpid()
    return int(os.pread(_Statm.descriptor, 64, 0).split()[0]) * resource.getpagesize()
