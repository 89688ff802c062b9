"""One JSON list of conversations, as LLaVA's files are.

Its elements are found by parsing, with every byte taken for a character: what JSON is built from is ASCII, so positions
of characters are positions in the file, and an element can be read alone later.
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
    """Find the elements; the file is held in memory meanwhile. Raises UserError if it is not one JSON list."""
    content = path.read_bytes()
    try:
        spans = list(_elements(content.decode("latin-1"), content.index(b"[") + 1))
    except ValueError as error:
        raise UserError(f"{path}: is no JSON list to its end: {error}; mend or split the file") from error
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
    """Where each element of a list begins and ends, up to the closing bracket. ValueError where there is none."""
    decoder = json.JSONDecoder()
    while True:
        between = _BETWEEN.match(text, position)
        position = between.end() if between else position
        if text.startswith("]", position):
            return
        _, end = decoder.raw_decode(text, position)
        yield position, end
        position = end
