"""Opening files by name: regular ones only, with a limit on their size."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from omnibal_ext.errors import UserError

PathLike = str | os.PathLike[str]


def open_plain(path: PathLike, remedy: str, most_bytes: int | None = None) -> BufferedReader:
    """Open a regular file to read bytes. Raises UserError, naming file and remedy, for anything else, such as a named
    pipe, which might block for ever, and for a file of more than `most_bytes`."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except ValueError:  # a NUL or half a surrogate pair
        raise UserError(f"{str(path)!r}: is no file's name; {remedy}") from None
    if most_bytes is not None and (size := size_of(file)) > most_bytes:
        file.close()
        raise UserError(f"{path}: has {size} bytes, at most {most_bytes} are read; {remedy}")
    return file


def open_regular(path: PathLike) -> BufferedReader:
    """Open a regular file to read bytes, never waiting, as a named pipe would have it. Raises OSError for any other."""
    # Opening a named pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: PathLike, remedy: str, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most `most_bytes`. Raises UserError as `open_plain`."""
    with open_plain(path, remedy, most_bytes) as file:
        try:
            return file.read(size_of(file))  # not more, if it grows meanwhile
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None


def size_of(file: BufferedReader) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def is_plain_name(name: str) -> bool:
    """Say whether a text is a file's name only: no folder, no leading dot, so that it cannot lead out of its folder."""
    return Path(name).name == name and not name.startswith(".") and "\\" not in name
