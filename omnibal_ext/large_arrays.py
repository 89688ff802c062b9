"""Arrays larger than memory: mapped files, of which a piece at a time is looked at."""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from omnibal_ext.arrays import Ints
from omnibal_ext.files.writing import naming, replacing

PIECE = 1 << 20
"""Rows of an array of any size that are in memory at once."""
HEADER = 128
"""Bytes of an .npy file before its rows."""


def pieces(rows: int) -> Iterator[slice]:
    """Yield slices of at most `PIECE` (2**20) rows that cover `rows` rows in order."""
    for first in range(0, rows, PIECE):
        yield slice(first, min(rows, first + PIECE))


def in_pieces(*arrays: NDArray[Any]) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yield equally long arrays `PIECE` rows at a time; memory of those mapped from files is freed after each."""
    for piece in pieces(len(arrays[0])):
        yield tuple(array[piece] for array in arrays)
        release(*arrays)


def is_mapped(array: NDArray[Any]) -> bool:
    """Say whether an array is a file mapped into memory, written through to it, and not a copy of one."""
    return isinstance(array, np.memmap) and _map_of(array) is not None and array.mode != "c"


def _map_of(array: NDArray[Any]) -> Any:
    return getattr(array, "_mmap")  # noqa: B009, numpy has no public name for it


def release(*arrays: NDArray[Any]) -> None:
    """Free the memory of the arrays that are mapped files; their pages are read from disk again at the next use."""
    for array in filter(is_mapped, arrays):
        _map_of(array).madvise(mmap.MADV_DONTNEED)


def rows_of(array: NDArray[Any], numbers: Ints) -> NDArray[Any]:
    """Return `array[numbers]`, in memory; a mapped file is read once, front to back, whatever order they have."""
    if not is_mapped(array):
        return array[numbers]
    order, found = np.argsort(numbers, kind="stable"), np.empty((len(numbers), *array.shape[1:]), array.dtype)
    for piece in pieces(len(array)):
        first, end = np.searchsorted(numbers, (piece.start, piece.stop), sorter=order)
        found[order[first:end]] = array[numbers[order[first:end]]]
        release(array)
    return found


def scratch(shape: tuple[int, ...], dtype: DTypeLike, folder: Path | None) -> np.memmap[Any, Any]:
    """Return a writable array on disk, in a nameless file that ends with the program, whichever way that ends.

    Args:
        folder: where to; None: the system's folder for temporary files.

    Raises:
        UserError: the disk has no room.
    """
    with naming(folder or Path(tempfile.gettempdir())), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize))
        return np.memmap(file, dtype, "r+", shape=shape)


@contextmanager
def growing_array(path: Path) -> Iterator[Callable[[Ints], None]]:
    """Yield a function that appends int64 rows to a new .npy file; that appears at the end of the block, complete."""
    shapes: list[tuple[int, ...]] = []
    with replacing(path) as file:

        def append(rows: Ints) -> None:
            file.write(np.ascontiguousarray(rows, "<i8").data)
            shapes.append(rows.shape)

        file.write(bytes(HEADER))
        yield append
        file.seek(0)
        shape = (sum(rows for rows, *_ in shapes), *shapes[0][1:])
        npy.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": shape})
        assert file.tell() == HEADER
