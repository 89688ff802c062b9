"""What all formats have in common: input files, their parts, rows."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.modalities.place import Place
from omnibal_ext.output import printable
from omnibal_ext.reading.document import MOST_BYTES

ROWS_PER_PART = 500
MOST_VALUES = 2**21
"""Most values of one record: they take a hundred bytes of memory each."""
_SMALL = 2**20


def bulk_of(record: bytes) -> tuple[str, str] | None:
    """Return the fault (reason, detail) of a JSON record that is too large to be decoded; None if it is not."""
    if len(record) <= _SMALL:
        return None
    if len(record) > MOST_BYTES:
        return "malformed_line", f"more than {MOST_BYTES} bytes"
    values = sum(map(record.count, (b",", b"[", b"{")))
    return ("malformed_line", f"more than {MOST_VALUES} values") if values > MOST_VALUES else None


@contextmanager
def named_errors(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Make a context in which errors about a file become one line, "PATH: WHAT (ERROR); REMEDY"."""
    try:
        yield
    except UserError as error:
        told = str(error) if str(error).startswith(f"{path}: ") else f"{path}: {what} ({error}); {remedy}"
        raise UserError(told) from None
    except OSError as error:
        told = error.strerror or printable(str(error))[:200]
        raise UserError(f"{path}: {what if error.strerror is None else 'cannot be read'} ({told}); {remedy}") from error
    except Exception as error:  # a damaged file makes readers raise nearly anything
        told = printable(str(error) or type(error).__name__)[:200]
        raise UserError(f"{path}: {what} ({told}); {remedy}") from error


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
    """Tile limit of this file's conversations, if not the recipe's."""

    @property
    def lines_named(self) -> str:
        """File and numbers of its lines as messages name them, "FILE: lines 1 to 500"."""
        return f"{self.file}: lines {self.first_line} to {self.first_line + self.lines - 1}"


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
