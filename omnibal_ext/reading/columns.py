"""A column of a dataset folder, as Megatron Core's IndexedDataset: NAME.idx locates every sample in NAME.bin.

    "MMIDIDX" 0 0, version 1, type, S, D    int32 [S] lengths    int64 [S] first bytes    int64 [D] documents

In our columns every sample is a document and samples are contiguous, so the lengths determine the rest of the index.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.reading.files import open_plain, size_of

MAGIC = b"MMIDIDX\0\0"
FIXED = struct.Struct("<9sQBQQ")
TYPE_CODES: dict[Any, int] = {np.uint8: 1, np.int32: 4}
"""Megatron Core's codes for the types of our columns."""


def column_lengths(folder: Path, name: str, dtype: type, remedy: str) -> NDArray[np.int32]:
    """The length of every sample of a column, int32 [S].

    Raises UserError naming the file if the index or the size of the data does not match the lengths.
    """
    path = folder / f"{name}.idx"
    with open_plain(path, remedy) as file:
        try:
            if size_of(file) < FIXED.size:
                raise UserError("is no index of a column")
            lengths = _lengths(np.memmap(file, np.uint8, "r"), dtype)
        except UserError as error:
            raise UserError(f"{path}: {error}; {remedy}") from None
    data, wanted = folder / f"{name}.bin", int(lengths.sum(dtype=np.int64)) * np.dtype(dtype).itemsize
    with open_plain(data, remedy) as file:
        if size_of(file) != wanted:
            raise UserError(f"{data}: has {size_of(file)} bytes where {path.name} asks for {wanted}; {remedy}")
    return lengths


def _lengths(content: NDArray[np.uint8], dtype: type) -> NDArray[np.int32]:
    magic, version, code, samples, documents = FIXED.unpack(content[: FIXED.size].tobytes())
    if (magic, version, code) != (MAGIC, 1, TYPE_CODES[dtype]) or documents != samples + 1:
        raise UserError(f"is no index of a column of {np.dtype(dtype)}, a document a sample")
    if len(content) != FIXED.size + samples * (4 + 8) + documents * 8:
        raise UserError(f"has {len(content)} bytes, which are not those of {samples} samples")
    lengths = np.frombuffer(content, np.int32, samples, FIXED.size)
    if samples and lengths.min() < 0:
        raise UserError(f"sample {int(lengths.argmin())} has a length of {lengths.min()}")
    starts = np.frombuffer(content, np.int64, samples, FIXED.size + 4 * samples)
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    if not np.array_equal(starts, np.concatenate([[0], ends])[:samples]):
        raise UserError("samples do not lie end to end")
    last = np.frombuffer(content, np.int64, documents, FIXED.size + 12 * samples)
    if not np.array_equal(last, np.arange(documents)):
        raise UserError("documents are not samples")
    return lengths
