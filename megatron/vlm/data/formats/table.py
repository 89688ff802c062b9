"""Hugging Face datasets on disk: Parquet and Arrow files with a conversation a row.

The conversation is in the column `conversations` or `messages`; `image` or `images` hold paths or, as the library saves
images, {"bytes", "path"}; `video` or `videos`, `audio` or `audios` likewise. Bytes are not copied: training reads them
from their cell.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from megatron.vlm.data.formats.kinds import IMAGES, MEDIA
from megatron.vlm.data.formats.rows import InputFile, PartSource, Row, named_errors
from omnibal_ext.errors import UserError, missing_package
from omnibal_ext.launch.apart import apart
from omnibal_ext.modalities.place import Place
from omnibal_ext.reading.files import open_plain
from omnibal_ext.reading.memory import MOST_BEYOND, memory_beyond
from omnibal_ext.reading.stores import StorePath

CONVERSATIONS = ("conversations", "messages")
EDGE = 2**20
"""Bytes at both ends of a file that are hashed: they hold schema and metadata."""
BATCH = 16
REMEDY = "copy it again"
PARQUET, ARROW = b"PAR1", b"ARROW1"
STREAM = 8
"""Byte of an Arrow file at which its stream begins."""
END = b"\xff\xff\xff\xff\0\0\0\0"
"""Last bytes of an Arrow stream."""
FEW = 2**16
"""Rows that a table of any size may have; a larger one has at most one a byte."""


def cut(path: Path, rows_per_part: int) -> InputFile:
    """Cut a table into parts of `rows_per_part` rows. Raises UserError if it is damaged or has no conversations.

    It is read in a process of its own, which a damaged table may end.
    """
    _import_pyarrow(path)
    return apart(_cut, (path, rows_per_part), str(path))


def _cut(path: Path, rows_per_part: int) -> InputFile:
    table = _open(path)
    names, size = table.names, path.stat().st_size
    if not set(CONVERSATIONS) & set(names):
        known = ", ".join(name[:60] for name in names[:20])
        raise UserError(f"{path}: has no column {' or '.join(map(repr, CONVERSATIONS))}; it has {known}")
    if table.rows > max(FEW, size):
        raise UserError(f"{path}: has {table.rows} rows in {size} bytes; {REMEDY}")
    with _reading(path):
        table.check()
    with open_plain(path, REMEDY) as file:
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
    """Yield the rows of a part; in a process that `apart` started for it memory is limited."""
    found = _open(part.file).records(part.offset, part.size)
    number = part.first_line
    while number < part.first_line + part.lines:
        with _reading(part.file):
            records = next(found, None)
            if records is None:
                raise ValueError(f"its last row is {number - 1}")
        for record in records:
            yield _row(number, record)
            number += 1


def _row(number: int, record: dict[str, Any]) -> Row:
    images: dict[str, Place] = {}
    for column in (column for kind in MEDIA for column in kind.fields):
        if record.get(column) is not None and (column in IMAGES.fields or _holds_bytes(record[column])):
            record[column] = _named(record[column], column, number - 1, images)
    return Row(number, record, images=images)


def _holds_bytes(value: Any) -> bool:
    entries = value if isinstance(value, list) else [value]
    return any(isinstance(entry, bytes) or (isinstance(entry, Mapping) and entry.get("bytes")) for entry in entries)


def _named(value: Any, column: str, row: int, images: dict[str, Place]) -> Any:
    """Return a cell with names in place of its images' bytes, and add the place of each name to `images`."""
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
    """Return the bytes of an image in a table; `index` in the cell's list, -1 if the cell is one image."""
    table = _open(path)
    with _reading(path):
        cell = table.cell(column, row)
        entry = cell if index < 0 else cell[index]
        content: bytes = entry["bytes"] if isinstance(entry, Mapping) else entry
        return content


class _Parquet:
    """A Parquet file, read by row group; images by column as well."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self.path = path
        self.file = pyarrow.parquet.ParquetFile(open_plain(path, REMEDY))
        self.metadata = self.file.metadata
        self.names: list[str] = self.file.schema_arrow.names
        self.rows: int = self.metadata.num_rows
        groups = [self.metadata.row_group(group) for group in range(self.file.num_row_groups)]
        self.starts = [0, *accumulate(group.num_rows for group in groups)]
        self.column = lru_cache(maxsize=2)(self._column)

    def check(self) -> None:
        """Raise ValueError unless its row groups have all rows, or if it is several files that were joined."""
        if self.starts[-1] != self.rows or any(end < start for start, end in pairwise(self.starts)):
            raise ValueError(f"it says {self.rows} rows, its groups have {self.starts[-1]}")
        with open_plain(self.path, REMEDY) as file:
            file.seek(self._end_of_groups())
            if PARQUET * 2 in file.read():
                raise ValueError("it is several files that were joined: one ends where another begins")

    def _end_of_groups(self) -> int:
        end = len(PARQUET)
        for group in range(self.metadata.num_row_groups):
            for number in range(self.metadata.num_columns):
                column = self.metadata.row_group(group).column(number)
                starts = (column.dictionary_page_offset or column.data_page_offset, column.data_page_offset)
                end = max(end, min(starts) + column.total_compressed_size)
        return end

    def records(self, first: int, count: int) -> Iterator[list[dict[str, Any]]]:
        """Yield `count` rows from `first` on, a few at a time."""
        groups = [g for g, (start, end) in enumerate(pairwise(self.starts)) if start < first + count and end > first]
        position = self.starts[groups[0]] if groups else 0
        for batch in self.file.iter_batches(BATCH, row_groups=groups, use_threads=False):
            begin, end = max(first - position, 0), min(first + count - position, len(batch))
            position += len(batch)
            if begin < end:
                batch.validate(full=True)
                yield batch.slice(begin, end - begin).to_pylist()

    def cell(self, column: str, row: int) -> Any:
        """Return a cell as a Python value."""
        group = bisect_right(self.starts, row) - 1
        return self.column(group, column)[row - self.starts[group]].as_py()

    def _column(self, group: int, column: str) -> Any:
        found = self.file.read_row_group(group, columns=[column], use_threads=False).column(0)
        found.validate(full=True)
        return found


class _Arrow:
    """An Arrow file, memory-mapped; read as the Arrow stream that it contains, or is."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.ipc

        self.path = path
        with open_plain(path, REMEDY) as file:
            start = STREAM if file.read(len(ARROW)) == ARROW else 0
        source = pyarrow.memory_map(str(path))
        source.seek(start)
        reader = pyarrow.ipc.open_stream(source)
        self.names: list[str] = reader.schema.names
        self.batches = list(reader)
        self.read = source.tell()
        self.starts = [0, *accumulate(map(len, self.batches))]
        self.rows = self.starts[-1]
        self.checked = lru_cache(maxsize=None)(self._checked)

    def check(self) -> None:
        """Raise ValueError unless the stream ends as it should, and nothing but a file's footer is behind it."""
        with open_plain(self.path, REMEDY) as file:
            is_file = file.read(len(ARROW)) == ARROW
            file.seek(self.read - len(END))
            end, footer = file.read(len(END)), file.read()
        if end != END:
            raise ValueError("it has no end: it is cut off")
        length = int.from_bytes(footer[-10:-6], "little") + 10
        if len(footer) != length * is_file or (is_file and not footer.endswith(ARROW)):
            raise ValueError(f"it goes on behind its end at byte {self.read}, as files that were joined by `cat` do")

    def records(self, first: int, count: int) -> Iterator[list[dict[str, Any]]]:
        """Yield `count` rows from `first` on, a few at a time."""
        while count and first < self.rows:
            number = bisect_right(self.starts, first) - 1
            taken = min(BATCH, count, self.starts[number + 1] - first)
            yield self.checked(number).slice(first - self.starts[number], taken).to_pylist()
            first, count = first + taken, count - taken

    def cell(self, column: str, row: int) -> Any:
        """Return a cell as a Python value."""
        number = bisect_right(self.starts, row) - 1
        return self.checked(number).column(column)[row - self.starts[number]].as_py()

    def _checked(self, number: int) -> Any:
        """Return a batch, validated: a damaged one would end this process where its values are taken."""
        self.batches[number].validate(full=True)
        return self.batches[number]


@lru_cache(maxsize=16)
def _open(path: Path) -> _Parquet | _Arrow:
    _import_pyarrow(path)
    if path.suffix != ".parquet" and isinstance(path, StorePath):
        raise UserError(
            f"{path}: Arrow files are mapped, which one in a store cannot be; copy it, or write it as Parquet"
        )
    with _reading(path), open_plain(path, REMEDY):  # a named pipe would wait
        return _Parquet(path) if path.suffix == ".parquet" else _Arrow(path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Make a context in which to read a table: errors name it; in a process that `apart` started memory is limited."""
    try:
        with named_errors(path, f"is no whole {path.suffix[1:]} file", REMEDY), memory_beyond(path.stat().st_size):
            yield
    except UserError as error:
        if not isinstance(error.__cause__, MemoryError):
            raise
        most = f"reading it takes its size and {MOST_BEYOND >> 20} MiB of memory"
        raise UserError(f"{path}: {most}, and more; write it anew with smaller cells and groups of rows") from None


def _import_pyarrow(path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UserError(f"{path}: reading it needs {missing_package('pyarrow') or error}") from error
