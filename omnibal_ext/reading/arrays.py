"""NumPy files: .npy mapped into memory, .npz read array by array; numbers and texts, never pickled objects."""

import io
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.lib import format as npy
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import shown
from omnibal_ext.reading.files import PathLike, open_plain

PLAIN_KINDS = "biufSU"
"""NumPy's letters for types of numbers and texts."""
UNPACKED = 2**28
MOST_RATIO = 100
"""Largest array as a multiple of its compressed size, if it exceeds `UNPACKED` bytes; more is a decompression bomb."""


def map_array(path: PathLike, remedy: str) -> NDArray[Any]:
    """Map a .npy file into memory, read-only. Raises UserError, naming file and `remedy`, if it is damaged."""
    with open_plain(path, remedy), _named(path, remedy, "no .npy file"):  # a pipe is refused first
        return _plain(npy.open_memmap(path, mode="r"))


def read_arrays(path: PathLike, names: Sequence[str], remedy: str) -> list[NDArray[Any]]:
    """Return arrays of a .npz file in the order of `names`, CRCs checked. Raises UserError naming file and array."""
    with _archive(path, remedy) as archive:
        found = _array_names(archive)
        for name in names:
            if name not in found:
                raise UserError(f"has no array {name!r}; it has {', '.join(map(shown, found[:20]))}")
        return [_read(archive, name) for name in names]


def array_names(path: PathLike, remedy: str) -> tuple[str, ...]:
    """Return the names of the arrays of a .npz file. Raises UserError naming the file."""
    with _archive(path, remedy) as archive:
        return tuple(_array_names(archive))


@contextmanager
def _archive(path: PathLike, remedy: str) -> Iterator[zipfile.ZipFile]:
    with open_plain(path, remedy) as file, _named(path, remedy, "no .npz file"), zipfile.ZipFile(file) as archive:
        yield archive


@contextmanager
def _named(path: PathLike, remedy: str, what: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}; {remedy}") from None
    except Exception as error:  # a damaged file makes the readers raise nearly anything
        raise UserError(f"{path}: is {what}, or damaged ({str(error)[:200]!r}); {remedy}") from None


def _array_names(archive: zipfile.ZipFile) -> list[str]:
    return [name.removesuffix(".npy") for name in archive.namelist()]


def _read(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    member = f"{name}.npy" if f"{name}.npy" in archive.namelist() else name
    entry = archive.getinfo(member)
    if entry.file_size > max(UNPACKED, MOST_RATIO * entry.compress_size):
        raise UserError(f"array {name!r} would be {entry.file_size} bytes of {entry.compress_size}")
    content = archive.read(entry)  # all of it, so that its CRC is compared
    return _plain(npy.read_array(io.BytesIO(content), allow_pickle=False))


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind not in PLAIN_KINDS:
        raise UserError(f"holds {array.dtype}, which are no numbers or texts")
    return array
