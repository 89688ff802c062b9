"""How much memory reading a stranger's file may take beyond the file itself."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

MOST_BYTES = 2**29
"""512 MiB. Headers of a few bytes can ask for gigabytes."""


@contextmanager
def limited_memory(most_bytes: int = MOST_BYTES) -> Iterator[None]:
    """Inside of it this process gets at most `most_bytes` more: asking for more fails, as on a machine that is full.

    Python raises MemoryError, libraries errors of their own. All threads are held to it: for programs that measure
    files, not for those that train.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _taken() + most_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _taken() -> int:
    descriptor = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(descriptor, 64).split()[0]) * resource.getpagesize()
    finally:
        os.close(descriptor)
