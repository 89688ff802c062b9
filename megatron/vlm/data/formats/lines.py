"""JSON Lines: one conversation a line, in UTF-8, with or without a byte order mark."""

import codecs
import hashlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from megatron.vlm.data.formats.rows import MOST_BYTES, InputFile, PartSource, Row, bulk_of, named_errors
from omnibal_ext.errors import UserError
from omnibal_ext.reading.files import open_plain

REMEDY = "name a readable file, or copy it again"
_OTHER = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_BLOCK = 2**20


def cut(path: Path, rows_per_part: int) -> InputFile:
    """Cut a file into parts of `rows_per_part` lines and hash it in one pass. Raises UserError if it is in UTF-16."""
    digest, ends = hashlib.sha256(), [0]
    position = lines = 0
    block = b""
    with named_errors(path, "cannot be read", REMEDY), open_plain(path, REMEDY) as file:
        while more := file.read(_BLOCK):
            block = more
            if not position and block.startswith(_OTHER):
                raise UserError(f"{path}: is written in UTF-16, not in UTF-8; convert it: iconv -f UTF-16 -t UTF-8")
            digest.update(block)
            at = 0
            while at := block.find(b"\n", at) + 1:
                lines += 1
                if lines % rows_per_part == 0:
                    ends.append(position + at)
            position += len(block)
    lines += block[-1:] not in (b"\n", b"")
    if position > ends[-1]:
        ends.append(position)
    parts = []
    for number, (start, end) in enumerate(pairwise(ends)):
        first = number * rows_per_part
        parts.append(PartSource(path, start, end - start, first + 1, min(rows_per_part, lines - first)))
    return InputFile(path, digest.hexdigest(), lines, tuple(parts))


def rows(part: PartSource) -> Iterator[Row]:
    """Yield the lines of a part that are not blank, with their numbers in the file."""
    with named_errors(part.file, "cannot be read", REMEDY), open_plain(part.file, REMEDY) as file:
        offset = part.offset
        file.seek(offset)
        for number in range(part.first_line, part.first_line + part.lines):
            line = file.readline(MOST_BYTES + 1)
            size = len(line)
            while not line.endswith(b"\n") and (rest := file.readline(MOST_BYTES)):  # of a line that is too long
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield Row(number, line.removesuffix(b"\n"), offset, fault=bulk_of(line))
            offset += size
