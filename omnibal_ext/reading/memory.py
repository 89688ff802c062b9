"""How much memory reading a stranger's file may take beyond the file itself."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_BYTES = 2**29
"""512 MiB. Headers of a few bytes can ask for gigabytes."""


@contextmanager
def limited_memory(most_bytes: int = MOST_BYTES) -> Iterator[None]:
    """Inside of it this process gets at most `most_bytes` more: asking for more fails, as on a machine that is full.

    Python raises MemoryError, libraries errors of their own. All threads are held to it: for programs that measure
    files, not for those that train.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    limit = taken + most_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
