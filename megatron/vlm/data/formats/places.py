"""Images and videos inside of input files: bytes at an offset, base64 at an offset, or a table's cell."""

import base64
import io
from pathlib import Path
from typing import BinaryIO

from megatron.vlm.data.formats.rows import Row
from megatron.vlm.data.formats.table import read_cell
from omnibal_ext.modalities.place import Place
from omnibal_ext.reading.files import open_part


def open_place(path: Path, place: Place) -> BinaryIO:
    """Open the bytes at a place in a file. Raises ValueError for damaged base64, UserError for a file that cannot be
    read."""
    kind, *where = place
    if kind == "cell":
        column, row, index = where
        return io.BytesIO(read_cell(path, str(column), int(row), int(index)))
    offset, size = map(int, where)
    part = open_part(path, offset, size, "see that it is there")
    return part if kind == "bytes" else io.BytesIO(base64.b64decode(part.read(), validate=True))


def embedded(reference: str, row: Row) -> Place | None:
    """Return where the base64 of a `data:` URL lies in its row's file; None if there is none, or it is escaped."""
    payload = reference.partition(";base64,")[2].encode()
    start = row.record.find(payload) if payload and isinstance(row.record, bytes) else -1
    return None if start < 0 else ("base64", row.offset + start, len(payload))
