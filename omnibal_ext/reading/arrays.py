"""NumPy files: .npy mapped into memory, .npz read array by array; numbers and texts, never pickled objects."""

import math
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import shown
from omnibal_ext.reading.files import PathLike, open_plain, size_of

MAGIC = b"\x93NUMPY"
HEADER = re.compile(
    rb"\{'descr': '([<|=]?(?:[biuf]\d{1,2}|[US]\d{1,9}))', 'fortran_order': False, "
    rb"'shape': \((?:(\d{1,15}),?|(\d{1,15}), (\d{1,15}))?\), \} *\n"
)
"""The header of a .npy file as NumPy writes it: at most two dimensions, C order, native byte order."""
MOST_HEADER = 2**12
UNPACKED = 2**28
MOST_RATIO = 100
"""Largest array as a multiple of its compressed size, if it exceeds `UNPACKED` bytes; more is a decompression bomb."""


@dataclass(frozen=True)
class _Layout:
    """Type and shape of an array in a file, and the byte at which its values begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def map_array(path: PathLike, remedy: str) -> NDArray[Any]:
    """A .npy file as a read-only memory-mapped array. Raises UserError naming the file and the remedy."""
    with open_plain(path, remedy) as file:
        try:
            layout = _layout(file.read(MOST_HEADER), size_of(file))
        except UserError as error:
            raise UserError(f"{path}: {error}; {remedy}") from None
        if not math.prod(layout.shape):  # zero bytes cannot be mapped
            return np.zeros(layout.shape, layout.dtype)
        return np.memmap(file, layout.dtype, "r", layout.offset, layout.shape)


def read_arrays(path: PathLike, names: Sequence[str], remedy: str) -> list[NDArray[Any]]:
    """Arrays of a .npz file, verified by its CRCs. Raises UserError naming the file and the array."""
    with _archive(path, remedy) as archive:
        found = _array_names(archive)
        for name in names:
            if name not in found:
                raise UserError(f"has no array {name!r}; it has {', '.join(map(shown, found[:20]))}")
        return [_read(archive, name) for name in names]


def array_names(path: PathLike, remedy: str) -> tuple[str, ...]:
    """The names of the arrays of a .npz file. Raises UserError naming the file."""
    with _archive(path, remedy) as archive:
        return tuple(_array_names(archive))


@contextmanager
def _archive(path: PathLike, remedy: str) -> Iterator[zipfile.ZipFile]:
    with open_plain(path, remedy) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                yield archive
        except UserError as error:
            raise UserError(f"{path}: {error}; {remedy}") from None
        except Exception as error:  # a damaged archive makes the reader raise nearly anything
            raise UserError(f"{path}: is no .npz file, or damaged ({str(error)[:200]!r}); {remedy}") from None


def _array_names(archive: zipfile.ZipFile) -> list[str]:
    return [name.removesuffix(".npy") for name in archive.namelist()]


def _read(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    member = f"{name}.npy" if f"{name}.npy" in archive.namelist() else name
    entry = archive.getinfo(member)
    if entry.file_size > max(UNPACKED, MOST_RATIO * entry.compress_size):
        raise UserError(f"array {name!r} would be {entry.file_size} bytes of {entry.compress_size}")
    content = archive.read(entry)
    try:
        layout = _layout(content[:MOST_HEADER], len(content))
    except UserError as error:
        raise UserError(f"array {name!r} {error}") from None
    return np.frombuffer(content, layout.dtype, offset=layout.offset).reshape(layout.shape)


def _layout(start: bytes, size: int) -> _Layout:
    """Parse the header at the start of a .npy file of `size` bytes. Raises UserError for one that is not valid."""
    width = {1: 2, 2: 4, 3: 4}.get(start[6] if start[:6] == MAGIC and len(start) > 6 else 0)
    if width is None:
        raise UserError("is no .npy file")
    begin = 8 + width
    offset = begin + int.from_bytes(start[8:begin], "little")
    match = HEADER.fullmatch(start[begin:offset]) if offset <= len(start) else None
    if match is None:
        raise UserError("has a header that is not read here: plain numbers or texts, one or two dimensions")
    try:
        dtype = np.dtype(match[1].decode())
    except TypeError:
        raise UserError(f"holds {match[1].decode()!r}, which are no numbers") from None
    layout = _Layout(dtype, tuple(int(side) for side in match.groups()[1:] if side), offset)
    if dtype.itemsize == 0 or layout.end != size:
        raise UserError(f"has {size} bytes where its header asks for {layout.end}")
    return layout
