"""The only functions that write files and folders: these appear under their names complete, or not at all.

What is not complete has a hidden name that nobody can guess, and is locked by its writer. A lock ends with its process,
so the next program that writes the same knows what a killed one has left, and removes it.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from omnibal_ext.errors import from_os_error

TOKEN_BYTES = 8
DEVICES = ("/dev", "/proc")
"""What lies here is written to as it is, such as /dev/stdout."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a UserError; it names `path` if the error names no file, as numpy's do."""
    try:
        yield
    except OSError as error:
        raise from_os_error(error if error.filename is not None else _named(error, path)) from None


def _named(error: OSError, path: Path) -> OSError:
    # numpy says how much was written, and not why not all of it.
    return OSError(error.errno or errno.ENOSPC, error.strerror or str(error), str(path))


@contextmanager
def replacing(target: Path, is_lasting: bool = True) -> Iterator[BinaryIO]:
    """Yield a file to write bytes to; without an error it takes the place of `target`, atomically.

    Unless `is_lasting`, a power cut may damage it, so readers must notice that. Where `target` is a link, what it
    points to is replaced; a device or a pipe is written to. Raises UserError naming `target` if it cannot be written;
    no partial file is left.
    """
    try:
        if _is_special(target):
            with os.fdopen(os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "wb") as device:
                yield device
            return
        target = Path(os.path.realpath(target))
        partial, file = _new_file(target)
        try:
            with file:
                yield file
                file.flush()
                if is_lasting:
                    os.fsync(file.fileno())
                partial.replace(target)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise from_os_error(_named(error, target)) from None


def _is_special(target: Path) -> bool:
    try:
        mode = target.stat().st_mode
    except OSError:  # nothing is there yet
        return False
    parent = Path(os.path.realpath(target.parent))
    of_devices = str(parent) == DEVICES[0] or parent.is_relative_to(DEVICES[1])
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or of_devices


def _new_file(target: Path) -> tuple[Path, BinaryIO]:
    """Return the path of a new hidden file next to `target`, and the file, locked and open for writing."""
    while True:
        partial = hidden_name(target)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.fdopen(os.open(partial, flags, 0o666), "wb")
        _lock(file.fileno())
        if partial.exists():  # else taken, before it was locked, for one that was left
            return partial, file
        file.close()


def hidden_name(target: Path) -> Path:
    """Return a hidden name next to `target` that nobody can guess, for what is not complete yet."""
    return target.with_name(f".{target.name}.{secrets.token_hex(TOKEN_BYTES)}")


@contextmanager
def new_folder(name: Path) -> Iterator[Path]:
    """Make a folder with a name of `hidden_name` and the umask's rights, and yield it; it is locked in the block."""
    name.mkdir()
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(descriptor)
        yield name
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # without locks nothing is taken for left behind
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Remove incomplete files and folders that killed programs left in `folder` for `name` (None: for any name)."""
    wanted = re.compile(rf"\.{'.+' if name is None else re.escape(name)}\.[0-9a-f]{{{2 * TOKEN_BYTES}}}")
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if wanted.fullmatch(entry.name):
                _remove_left(Path(entry.path), entry.is_dir(follow_symlinks=False))


def _remove_left(path: Path, is_folder: bool) -> None:
    with suppress(OSError):  # of another user, or on a file system without locks
        descriptor = os.open(path, (os.O_RDONLY if is_folder else os.O_RDWR) | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its writer lives
            shutil.rmtree(path) if is_folder else path.unlink()
        finally:
            os.close(descriptor)
