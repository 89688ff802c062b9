"""JSON Lines: one conversation a line, in UTF-8, with or without a byte order mark."""

import codecs
import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from megatron.vlm.data.formats.rows import InputFile, PartSource, Row
from omnibal_ext.errors import UserError

_OTHER = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def cut(path: Path, rows_per_part: int) -> InputFile:
    """Cut a file into parts and hash it, in one pass. Raises UserError if it begins with UTF-16's or UTF-32's mark."""
    digest, parts = hashlib.sha256(), []
    offset = lines = 0
    with path.open("rb") as file:
        while block := list(islice(file, rows_per_part)):
            if not lines and block[0].startswith(_OTHER):
                raise UserError(f"{path}: is written in UTF-16, not in UTF-8; convert it: iconv -f UTF-16 -t UTF-8")
            size = sum(map(len, block))
            parts.append(PartSource(path, offset, size, first_line=lines + 1, lines=len(block)))
            offset, lines = offset + size, lines + len(block)
            for line in block:
                digest.update(line)
    return InputFile(path, digest.hexdigest(), lines, tuple(parts))


def rows(part: PartSource) -> Iterator[Row]:
    """The lines of a part that are not blank, with their numbers in the file."""
    with part.file.open("rb") as file:
        file.seek(part.offset)
        block = file.read(part.size)
    offset = part.offset
    for number, line in enumerate(block.split(b"\n"), start=part.first_line):
        if line.removeprefix(codecs.BOM_UTF8).strip():
            yield Row(number, line, offset)
        offset += len(line) + 1
