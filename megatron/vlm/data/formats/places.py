"""Images and videos inside of input files: bytes at an offset, base64 at an offset, or a table's cell."""

import base64
from pathlib import Path

from megatron.vlm.data.formats.rows import Row
from megatron.vlm.data.formats.table import read_cell
from omnibal_ext.modalities.place import Place
from omnibal_ext.reading.files import open_plain


def read_place(path: Path, place: Place) -> bytes:
    """Read the bytes at a place in a file. Raises ValueError for damaged base64, UserError for a file that cannot
    be."""
    kind, *where = place
    if kind == "cell":
        column, row, index = where
        return read_cell(path, str(column), int(row), int(index))
    offset, size = map(int, where)
    with open_plain(path, "see that it is there") as file:
        file.seek(offset)
        content = file.read(size)
    return base64.b64decode(content, validate=True) if kind == "base64" else content


def embedded(reference: str, row: Row) -> Place | None:
    """Return where the base64 of a `data:` URL lies in its row's file; None if there is none, or it is escaped."""
    payload = reference.partition(";base64,")[2].encode()
    start = row.record.find(payload) if payload and isinstance(row.record, bytes) else -1
    return None if start < 0 else ("base64", row.offset + start, len(payload))
