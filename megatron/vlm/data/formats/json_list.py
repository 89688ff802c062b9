"""One JSON list of conversations, as LLaVA's files are.

Elements are found by parsing the bytes as Latin-1: JSON's syntax is ASCII, and character positions are byte offsets, by
which an element can be read alone later.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from megatron.vlm.data.formats.rows import InputFile, PartSource, Row
from omnibal_ext.errors import UserError

_BETWEEN = re.compile(r"[\s,]*")


def cut(path: Path, rows_per_part: int) -> InputFile:
    """Cut a file, which is in memory meanwhile. Raises UserError if it is not one JSON list."""
    content = path.read_bytes()
    try:
        spans = list(_elements(content.decode("latin-1"), content.index(b"[") + 1))
    except ValueError as error:
        raise UserError(f"{path}: is no JSON list to its end: {error}; fix or split the file") from error
    parts = []
    for first in range(0, len(spans), rows_per_part):
        block = spans[first : first + rows_per_part]
        start, end = block[0][0], block[-1][1]
        parts.append(PartSource(path, start, end - start, first + 1, len(block), "json_list"))
    return InputFile(path, hashlib.sha256(content).hexdigest(), len(spans), tuple(parts))


def rows(part: PartSource) -> Iterator[Row]:
    """The elements of a part."""
    with part.file.open("rb") as file:
        file.seek(part.offset)
        block = file.read(part.size)
    text = block.decode("latin-1") + "]"
    for number, (start, end) in enumerate(_elements(text, 0), start=part.first_line):
        yield Row(number, block[start:end], part.offset + start)


def _elements(text: str, position: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each element up to the closing bracket. Raises ValueError if there is none."""
    decoder = json.JSONDecoder()
    while True:
        between = _BETWEEN.match(text, position)
        position = between.end() if between else position
        if text.startswith("]", position):
            return
        _, end = decoder.raw_decode(text, position)
        yield position, end
        position = end
