"""Memory that reading a file may take, in processes that were made to do such work and nothing else."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_BEYOND = 400 * 2**20
"""Bytes that a reader may take beyond the size of its file."""

_apart: set[int] = set()
"""Processes that do such work alone: this one, or the one that forked it."""


def work_apart() -> None:
    """Say that this process does such work alone: elsewhere a limit would hit other threads too."""
    _apart.add(os.getpid())


@contextmanager
def memory_beyond(size: int) -> Iterator[None]:
    """Context in which a process that works apart may take `size` and `MOST_BEYOND` bytes more.

    What asks for more gets a MemoryError, or what a library makes of it.
    """
    if os.getpid() not in _apart:
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _taken() + size + MOST_BEYOND
    lowest = min(limit for limit in (wanted, before, most) if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (lowest, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def _taken() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()
