"""Columns of a dataset folder on disk, in the format of core's IndexedDataset: a sample is a document of its own."""

from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from numpy.typing import NDArray

from megatron.vlm.data.columns import COLUMNS, OLDER, REMEDY
from omnibal_ext.errors import UserError
from omnibal_ext.files.writing import naming
from omnibal_ext.reading.files import open_plain, size_of

TYPES = {**COLUMNS, **OLDER}


class _Column(IndexedDataset):
    def __del__(self) -> None:
        """Do nothing: core's prints a traceback where the index could not be opened."""


def open_column(folder: Path, name: str) -> IndexedDataset:
    """Open a column, memory-mapped. Raises UserError unless its data have as many bytes as its index says."""
    data = folder / f"{name}.bin"
    with open_plain(data, REMEDY) as file:
        size = size_of(file)
    if not size:
        raise UserError(f"{data}: has no bytes; {REMEDY}")
    try:
        column = _Column(str(folder / name))
        wanted = int(column.sequence_lengths.sum(dtype=np.int64)) * np.dtype(TYPES[name]).itemsize
    except Exception as error:  # core asserts what an index must be
        raise UserError(f"{data}: cannot be read by its index ({error}); {REMEDY}") from error
    if size != wanted:
        raise UserError(f"{data}: has {size} bytes where {name}.idx asks for {wanted}; {REMEDY}")
    return column


class ColumnWriter:
    """A writer of one column of a dataset folder; each sample is a document of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._index = folder / f"{name}.idx"
        self._data = folder / f"{name}.bin"
        with naming(self._data):
            self._builder = IndexedDatasetBuilder(str(self._data), dtype=TYPES[name])

    def append(self, values: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Add samples of `lengths`, concatenated in `values`. Raises UserError naming a file that cannot be written."""
        with naming(self._data):
            self._builder.add_document(values, lengths.tolist())

    def close(self) -> None:
        """Write the index. Raises UserError as `append`."""
        # The builder took every call for one document; a call a sample would take ten times as long.
        self._builder.document_indices = list(range(len(self._builder.sequence_lengths) + 1))
        with naming(self._data):
            self._builder.finalize(str(self._index))
