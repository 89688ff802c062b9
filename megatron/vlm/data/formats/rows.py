"""What every format comes to: rows, parts of files, files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROWS_PER_PART = 500
Place = tuple[str | int, ...]
"""Where an image is in a file that holds more: ("bytes" or "base64", offset, size), ("cell", column, row, place)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation as its file has it.

    `record` is JSON text as it stands in the file from byte `offset` on, or fields that are read already. `images` are
    those that the row holds itself, by the names by which its record may speak of them. A `fault`, reason and detail,
    says why there is nothing to read.
    """

    number: int  # counted from 1
    record: bytes | Mapping[str, Any]
    offset: int = 0
    images: Mapping[str, Place] = field(default_factory=dict)
    fault: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class PartSource:
    """Where a part's rows are: `size` bytes of `file` from `offset` (of a table: rows); `first_line` counts from 1."""

    file: Path
    offset: int
    size: int
    first_line: int
    lines: int
    format: str = "lines"
    root: Path | None = None
    """Where image paths start from, if not at the recipe's image root."""
    max_tiles: int | None = None
    """Of this file's conversations, if not the recipe's."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file as it was read: its hash, its rows, and the parts it is cut into."""

    path: Path
    sha256: str
    lines: int
    parts: tuple[PartSource, ...]
    root: Path | None = None
    weight: float = 1.0
    """Times that an epoch sees each sample, where the user's files say so."""
