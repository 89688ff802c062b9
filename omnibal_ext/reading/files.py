"""Opening a file that was named to us: a regular one, of a size that can be meant."""

import os
import stat
from io import BufferedReader
from pathlib import Path

from omnibal_ext.errors import UserError

PathLike = str | os.PathLike[str]


def open_plain(path: PathLike, remedy: str, most_bytes: int | None = None) -> BufferedReader:
    """Open a regular file for reading; a named pipe or a device, which may wait for ever, is refused.

    Raises UserError naming the file, and the remedy.
    """
    try:
        # Opening a named pipe would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except ValueError:  # a NUL or half a surrogate pair
        raise UserError(f"{str(path)!r}: is no file's name; {remedy}") from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (most_bytes is None or status.st_size <= most_bytes):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: cannot be read (no regular file); {remedy}")
    raise UserError(f"{path}: has {status.st_size} bytes, at most {most_bytes} are read; {remedy}")


def read_bytes(path: PathLike, remedy: str, most_bytes: int) -> bytes:
    """The whole content of a regular file. Raises UserError as `open_plain`."""
    with open_plain(path, remedy, most_bytes) as file:
        try:
            return file.read(size_of(file))  # as large as it was when its size was checked
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None


def size_of(file: BufferedReader) -> int:
    """Bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def is_plain_name(name: str) -> bool:
    """Whether a name is that of a file in the folder that names it: no way out of the folder, nothing hidden."""
    return Path(name).name == name and not name.startswith(".") and "\\" not in name
