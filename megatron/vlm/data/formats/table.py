"""Hugging Face datasets on disk: Parquet and Arrow files with a conversation a row.

The conversation is in the column `conversations` or `messages`; `image` or `images` hold paths or, as the library saves
images, {"bytes", "path"}; `video` or `videos`, `audio` or `audios` likewise. Bytes are not copied: training reads them
from their cell.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron.vlm.data.formats.rows import InputFile, PartSource, Place, Row
from omnibal_ext.errors import UserError, missing_package

CONVERSATIONS, IMAGES, VIDEOS = ("conversations", "messages"), ("image", "images"), ("video", "videos")
AUDIOS = ("audio", "audios", "sound", "sounds")
EDGE = 2**20
"""Bytes at both ends of a file that are hashed: they hold schema and metadata."""
BATCH = 64


def cut(path: Path, rows_per_part: int) -> InputFile:
    """Cut a table by rows. Raises UserError if it is damaged or has no column of conversations."""
    table = _open(path)
    names = table.names
    if not set(CONVERSATIONS) & set(names):
        raise UserError(f"{path}: has no column {' or '.join(map(repr, CONVERSATIONS))}; it has {', '.join(names)}")
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(f"{size} {table.rows}\n".encode() + file.read(EDGE))
        file.seek(max(0, size - EDGE))
        digest.update(file.read())
    parts = tuple(
        PartSource(path, first, min(rows_per_part, table.rows - first), first + 1,
                   min(rows_per_part, table.rows - first), "table")
        for first in range(0, table.rows, rows_per_part)
    )  # fmt: skip
    return InputFile(path, digest.hexdigest(), table.rows, parts)


def rows(part: PartSource) -> Iterator[Row]:
    """The rows of a part."""
    table = _open(part.file)
    for number, record in enumerate(table.records(part.offset, part.size), start=part.first_line):
        images: dict[str, Place] = {}
        for column in (*IMAGES, *VIDEOS, *AUDIOS):
            if record.get(column) is not None and (column in IMAGES or _holds_bytes(record[column])):
                record[column] = _named(record[column], column, number - 1, images)
        yield Row(number, record, images=images)


def _holds_bytes(value: Any) -> bool:
    entries = value if isinstance(value, list) else [value]
    return any(isinstance(entry, bytes) or (isinstance(entry, Mapping) and entry.get("bytes")) for entry in entries)


def _named(value: Any, column: str, row: int, images: dict[str, Place]) -> Any:
    """The value with cells' images replaced by names, whose places are added to `images`."""
    several = isinstance(value, list)
    names: list[Any] = []
    for index, entry in enumerate(value if several else [value]):
        inside = isinstance(entry, Mapping) and entry.get("bytes") is not None
        if inside or isinstance(entry, bytes):
            name = f"{column}[{index}]"
            images[name] = ("cell", column, row, index if several else -1)
            names.append(name)
        else:
            names.append(entry.get("path") if isinstance(entry, Mapping) else entry)
    return names if several else names[0]


def read_cell(path: Path, column: str, row: int, index: int) -> bytes:
    """The bytes of an image in a table; `index` in the cell's list, -1 if the cell is one image."""
    cell = _open(path).cell(column, row)
    entry = cell if index < 0 else cell[index]
    content: bytes = entry["bytes"] if isinstance(entry, Mapping) else entry
    return content


class _Parquet:
    """Parquet: read by row group, images by column as well."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self.file = pyarrow.parquet.ParquetFile(path)
        self.names: list[str] = self.file.schema_arrow.names
        self.rows: int = self.file.metadata.num_rows
        counts = [self.file.metadata.row_group(group).num_rows for group in range(self.file.num_row_groups)]
        self.starts = [sum(counts[:group]) for group in range(len(counts) + 1)]
        self.column = lru_cache(maxsize=2)(self._column)

    def records(self, first: int, count: int) -> Iterator[dict[str, Any]]:
        groups = [
            g for g in range(len(self.starts) - 1) if self.starts[g] < first + count and self.starts[g + 1] > first
        ]
        position = self.starts[groups[0]] if groups else 0
        for batch in self.file.iter_batches(BATCH, row_groups=groups):
            begin, end = max(first - position, 0), min(first + count - position, len(batch))
            if begin < end:
                yield from batch.slice(begin, end - begin).to_pylist()
            position += len(batch)

    def cell(self, column: str, row: int) -> Any:
        group = next(g for g in range(len(self.starts)) if self.starts[g + 1] > row)
        return self.column(group, column)[row - self.starts[group]].as_py()

    def _column(self, group: int, column: str) -> Any:
        return self.file.read_row_group(group, columns=[column]).column(0)


class _Arrow:
    """Arrow: memory-mapped."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.ipc

        try:
            reader = pyarrow.ipc.open_stream(pyarrow.memory_map(str(path)))
        except pyarrow.ArrowInvalid:  # the file layout, not the stream
            reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        self.table = reader.read_all()
        self.names: list[str] = self.table.column_names
        self.rows: int = self.table.num_rows

    def records(self, first: int, count: int) -> Iterator[dict[str, Any]]:
        for start in range(first, first + count, BATCH):
            yield from self.table.slice(start, min(BATCH, first + count - start)).to_pylist()

    def cell(self, column: str, row: int) -> Any:
        return self.table.column(column)[row].as_py()


@lru_cache(maxsize=16)
def _open(path: Path) -> _Parquet | _Arrow:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError(f"{path}: reading it needs {missing_package('pyarrow') or error}") from error
    try:
        return _Parquet(path) if path.suffix == ".parquet" else _Arrow(path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: is no whole {path.suffix[1:]} file ({error}); copy it again") from error
