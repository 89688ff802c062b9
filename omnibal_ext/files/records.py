"""JSON files that one program writes, atomically, and another reads; files to which a run appends lines; and
the SHA-256 of files, which a manifest lists."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError, from_os_error
from omnibal_ext.files.writing import remove_unfinished, replacing
from omnibal_ext.output import say
from omnibal_ext.reading.checks import Value, shown
from omnibal_ext.reading.document import if_sealed, read_json
from omnibal_ext.reading.files import open_plain


def read_record(path: str | os.PathLike[str], what: str, tool: str, build: Callable[[Any], Value]) -> Value:
    """Return `build(content)` of a JSON file; if the file has a hash of its content, that must be right.

    Raises UserError naming the file, `what` it is, and `tool`, which makes such files.
    """

    try:
        return read_json(path, if_sealed(lambda _, record: build(record)), f"make one with {tool}")
    except UserError as error:
        raise UserError(f"{what} {error}") from None


def check_version(record: Any, version: int, remedy: str) -> None:
    """Raise UserError, ending with `remedy`, unless `record` is an object whose `schema_version` is `version`."""
    if not isinstance(record, Mapping):
        raise UserError("must be one JSON object")
    if record.get("schema_version") != version:
        found = shown(record.get("schema_version"))
        raise UserError(f"schema_version is {found}, this program reads {version}; {remedy}")


def write_record(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, in a folder that is made if needed. Raises UserError as `write_text`."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_os_error(error) from None
    write_text(target, json.dumps(record, indent=1) + "\n")


def write_text(target: Path, text: str) -> None:
    """Write a file atomically: a crash leaves the old one or the new one, also if several programs write it.

    Raises UserError naming the file if it cannot be written; no partial file is left, nor what a killed program left.
    """
    behind = Path(os.path.realpath(target))
    remove_unfinished(behind.parent, behind.name)
    with replacing(target) as file:
        file.write(text.encode())


class JsonLines:
    """A JSON Lines file to append to. A line that cannot be written is lost, with a warning, and the run goes on.

    An incomplete line at the end, left by a full disk or a crash, is removed before the next one is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failing = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Write the record as one more line; never raises OSError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            with self.path.open("r+b", buffering=0) as file:
                _append(file, json.dumps(record).encode() + b"\n")
        except OSError as error:
            if not self.failing:
                say(f"warning: {self.path}: cannot be written ({error.strerror}); training goes on without it")
            self.failing = True
        else:
            self.failing = False


def _append(file: Any, line: bytes) -> None:
    end = _end_of_lines(file)
    file.truncate(end)
    file.seek(end)
    try:
        while line:  # a write can be partial
            line = line[file.write(line) :]
    except OSError:
        file.truncate(end)
        raise


def _end_of_lines(file: Any) -> int:
    """Return the byte behind the last line end of an open file; 0: it has no complete line."""
    end: int = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 2**16)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


THREADS = min(8, os.cpu_count() or 1)
"""Files hashed at a time: hashlib releases the GIL."""


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text. Raises UserError if it cannot be opened."""
    with open_plain(path, "see that it is there") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return {name: SHA-256} of files in a folder, computed in several threads. Raises UserError as `sha256_of`."""
    ordered = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(ordered, pool.map(sha256_of, (folder / name for name in ordered)), strict=True))


def verify_checksums(folder: Path, expected: Mapping[str, str], remedy: str) -> None:
    """Raise UserError, naming a file, unless files of a folder have the `expected` SHA-256 ({name: hexadecimal})."""
    found = checksums_of(folder, expected)
    for name, checksum in expected.items():
        if found[name] != checksum:
            raise UserError(f"{folder / name}: damaged: its checksum is not the manifest's; {remedy}")
