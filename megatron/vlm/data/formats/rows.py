"""What every format is read as: input files, their parts, rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROWS_PER_PART = 500
Place = tuple[str | int, ...]
"""Of an image inside an input file: ("bytes" or "base64", offset, size), ("cell", column, row, index in its list)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation of an input file.

    `record`: JSON text, at byte `offset` of the file, or parsed fields. `images`: name in the record -> place, for
    images in the file itself. `fault`: (reason, detail) if the row cannot be read.
    """

    number: int  # counted from 1
    record: bytes | Mapping[str, Any]
    offset: int = 0
    images: Mapping[str, Place] = field(default_factory=dict)
    fault: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class PartSource:
    """A part of an input file: `size` bytes from `offset` (in tables: rows); `first_line` counts from 1."""

    file: Path
    offset: int
    size: int
    first_line: int
    lines: int
    format: str = "lines"
    root: Path | None = None
    """Image root of this file, if not the recipe's."""
    max_tiles: int | None = None
    """Limit of this file's conversations, if not the recipe's."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file: hash, number of rows, and parts."""

    path: Path
    sha256: str
    lines: int
    parts: tuple[PartSource, ...]
    root: Path | None = None
    weight: float = 1.0
    """How often an epoch has each sample (`repeat_time` of a meta file)."""
