"""Opening files by name, on a file system or in a store: regular ones only, with a limit on their size."""

import errno
import os
import stat
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import BinaryIO

from omnibal_ext.errors import UserError
from omnibal_ext.reading.objects import ObjectFile
from omnibal_ext.reading.stores import StorePath

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
    if isinstance(path, StorePath):
        return BufferedReader(ObjectFile(path))
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


def open_part(path: PathLike, start: int, size: int, remedy: str) -> BinaryIO:
    """Open `size` bytes of a file from `start` on as a file of its own. Raises UserError as `open_plain`."""
    if isinstance(path, StorePath):
        return BufferedReader(ObjectFile(path, start, size))
    with open_plain(path, remedy) as file:
        return BytesIO(read_at(file, start, size))


def read_at(file: BinaryIO, start: int, size: int) -> bytes:
    """Read at most `size` bytes from `start` on."""
    file.seek(start)
    return file.read(size)


def size_of(file: BinaryIO) -> int:
    """Return the size of an open file in bytes."""
    if (stored := _object(file)) is not None:
        return stored.size
    return len(file.getbuffer()) if isinstance(file, BytesIO) else os.fstat(file.fileno()).st_size


def version_of(file: BufferedReader) -> tuple[int | str, ...]:
    """Return the size of an open file, and what changes when its content is replaced."""
    if (stored := _object(file)) is not None:
        return stored.total, stored.mark
    found = os.fstat(file.fileno())
    return found.st_size, found.st_ino, found.st_mtime_ns


def mark_of(file: BinaryIO) -> str | None:
    """Return length and ETag of the object that an open file is, or lies in; None: it is none."""
    return stored.mark if (stored := _object(file)) is not None else None


def is_at_hand(file: BinaryIO, start: int) -> bool:
    """Return whether the bytes of an open file from `start` on cost no request to a store."""
    return (stored := _object(file)) is None or stored.is_at_hand(start)


def _object(file: BinaryIO) -> ObjectFile | None:
    raw = getattr(file, "raw", None)
    return raw if isinstance(raw, ObjectFile) else None


def is_plain_name(name: str) -> bool:
    """Say whether a text is a file's name only: no folder, no leading dot, so that it cannot lead out of its folder."""
    return Path(name).name == name and not name.startswith(".") and "\\" not in name
