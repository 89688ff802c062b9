"""Images that lie inside a file which holds more: read at their offset, or in their cell."""

import base64
from pathlib import Path

from megatron.vlm.data.formats.rows import Place, Row
from megatron.vlm.data.formats.table import read_cell


def read_place(path: Path, place: Place) -> bytes:
    """The bytes of an image inside a file.

    Raises ValueError if they are no base64 where they should be, OSError if the file cannot be read.
    """
    kind, *where = place
    if kind == "cell":
        column, row, index = where
        return read_cell(path, str(column), int(row), int(index))
    offset, size = map(int, where)
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    return base64.b64decode(content, validate=True) if kind == "base64" else content


def embedded(reference: str, row: Row) -> Place | None:
    """Where the image of a `data:` URL lies in its row's file; None if it stands there otherwise than in the URL."""
    payload = reference.partition(";base64,")[2].encode()
    start = row.record.find(payload) if payload and isinstance(row.record, bytes) else -1
    return None if start < 0 else ("base64", row.offset + start, len(payload))
