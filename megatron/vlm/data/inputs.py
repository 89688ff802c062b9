"""The input files of preprocessing: cut into parts and hashed; by one of many shards, for all of them."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.locks import working_on

LINES_PER_PART = 500


@dataclass(frozen=True, slots=True)
class PartSource:
    """Where a part's lines are: `size` bytes of `file` from `offset`; `first_line` counts from 1."""

    file: Path
    offset: int
    size: int
    first_line: int
    lines: int


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file as it was read: its hash, its lines, and the parts it is cut into."""

    path: Path
    sha256: str
    lines: int
    parts: tuple[PartSource, ...]


def read_inputs(paths: Sequence[Path], lines_per_part: int, notes: Path | None = None) -> tuple[InputFile, ...]:
    """Read files, or what another shard has noted down of them in the folder `notes` if they are still the same.

    The same: by path, size, inode and time of the last change. Raises `UserError` if one cannot be read.
    """
    if notes is None:
        return tuple(read_input(path, lines_per_part) for path in paths)
    notes.mkdir(parents=True, exist_ok=True)
    return tuple(_read_once(path, lines_per_part, notes) for path in paths)


def _read_once(path: Path, lines_per_part: int, notes: Path) -> InputFile:
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    key = [str(path), found.st_size, found.st_ino, found.st_mtime_ns, lines_per_part]
    note = notes / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
    with working_on(note):  # the others wait for the first
        if note.exists():
            return _from_record(json.loads(note.read_text(encoding="utf-8")))
        read = read_input(path, lines_per_part)
        temporary = note.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(asdict(read), default=str), encoding="utf-8")
        temporary.replace(note)
    return read


def _from_record(record: dict[str, Any]) -> InputFile:
    parts = (PartSource(**{**part, "file": Path(part["file"])}) for part in record["parts"])
    return InputFile(Path(record["path"]), record["sha256"], record["lines"], tuple(parts))


def read_input(path: Path, lines_per_part: int) -> InputFile:
    """Cut a file into parts and hash it, in one pass. Raises `UserError` if it cannot be read."""
    digest, parts = hashlib.sha256(), []
    offset = lines = 0
    try:
        with path.open("rb") as file:
            while block := list(islice(file, lines_per_part)):
                size = sum(map(len, block))
                parts.append(PartSource(path, offset, size, first_line=lines + 1, lines=len(block)))
                offset, lines = offset + size, lines + len(block)
                for line in block:
                    digest.update(line)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return InputFile(path, digest.hexdigest(), lines, tuple(parts))
