"""The folder for temporary files of what a program starts: torchrun's logs, sockets of ranks and their processes.

It is removed with the run. What a killed run leaves, the next start on this machine removes: a run holds a lock on its
folder, and Linux releases the lock of a process that has ended.
"""

import fcntl
import getpass
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "omnibal-ranks-"
LONGEST = 52
"""Characters of a folder's path, in which the names of sockets (at most 108) have room for ours."""


@contextmanager
def scratch() -> Iterator[dict[str, str]]:
    """Yield the environment variables with which ranks use a folder of their own; none if its path would be too long.

    Compiled code stays where torch would keep it, for the next start.
    """
    base = Path(tempfile.gettempdir())
    _remove_left(base)
    if len(os.fsencode(base)) > LONGEST:
        yield {}
        return
    folder, lock = _made(base)
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())  # as torch names it
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(base / f"torchinductor_{user}"))
    try:
        yield {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": compiled}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _made(base: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        with suppress(FileNotFoundError):  # another start took it for a killed run's
            lock = os.open(folder, os.O_RDONLY)
            with suppress(OSError):  # without locks nobody removes it
                fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_left(base: Path) -> None:
    """Remove the folders of this user's runs that have ended."""
    for folder in base.glob(f"{PREFIX}{'?' * 8}"):
        with suppress(OSError):  # gone meanwhile, in use, a link, or another user's
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
