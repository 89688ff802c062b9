"""JSON files that one program writes and another reads; written atomically."""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError, from_os_error
from omnibal_ext.reading.checks import Value, shown
from omnibal_ext.reading.document import read_json


def read_record(path: str | os.PathLike[str], what: str, tool: str, build: Callable[[Any], Value]) -> Value:
    """Return `build(content)` of a JSON file. Raises UserError naming the file, and `tool`, which makes such files."""
    try:
        return read_json(path, lambda _, record: build(record), f"make one with {tool}")
    except UserError as error:
        raise UserError(f"{what} {error}") from None


def check_version(record: Any, version: int, remedy: str) -> None:
    """Raise UserError, ending with `remedy`, unless the record is an object of this `schema_version`."""
    if not isinstance(record, Mapping):
        raise UserError("must be one JSON object")
    if record.get("schema_version") != version:
        found = shown(record.get("schema_version"))
        raise UserError(f"schema_version is {found}, this program reads {version}; {remedy}")


def write_record(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write a JSON file with `write_text`; makes its folder if needed."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise from_os_error(error) from None
    write_text(target, json.dumps(record, indent=1) + "\n")


def write_text(target: Path, text: str) -> None:
    """Write a file atomically: a crash leaves the old one or the new one, also if several programs write it.

    Raises UserError naming the file if it cannot be written; no partial file is left.
    """
    partial = target.with_name(f".{target.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise from_os_error(OSError(error.errno, error.strerror, str(target))) from None
