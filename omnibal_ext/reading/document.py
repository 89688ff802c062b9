"""JSON and JSON Lines files: limited in size and depth, and checked against a schema (`reading.checks`);
sealed ones have the hash of their own content, so that damage and changes by hand are detected."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import Check, Value, anything, mapping
from omnibal_ext.reading.files import PathLike, open_plain, read_bytes

MOST_BYTES = 2**26
"""Largest document: 64 MiB of JSON take about 1 GiB of memory."""
MOST_DEPTH = 64


def read_json(path: PathLike, check: Check[Value], remedy: str, most_bytes: int = MOST_BYTES) -> Value:
    """Return a JSON file's value as `check` returns it. Raises UserError naming file, the value's path, and remedy."""
    content = read_bytes(path, remedy, most_bytes)
    try:
        return check("", decode(content))
    except UserError as error:
        raise UserError(f"{path}: {error}; {remedy}") from None


def decode(content: bytes) -> Any:
    """Return the value of a JSON text in UTF-8. Raises UserError for invalid JSON, or deeper than `MOST_DEPTH`."""
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"not JSON ({str(error)[:200]})") from None
    if _is_deeper(value, MOST_DEPTH):
        raise UserError(f"not JSON that is read here (nested deeper than {MOST_DEPTH})")
    return value


def described(error: json.JSONDecodeError) -> str:
    """Return in words what is wrong with a JSON text, for a message."""
    is_open = error.msg.startswith("Invalid control character")
    return "a text has no quote at the end of its line" if is_open else error.msg


def read_lines(path: PathLike, check: Check[Value], remedy: str, most_bytes: int = MOST_BYTES) -> Iterator[Value]:
    """Yield the values of a JSON Lines file, as `check` returns them; lines have at most `most_bytes`.

    Raises UserError naming the file and the line.
    """
    with open_plain(path, remedy) as file:
        number = 0
        while line := file.readline(most_bytes + 1):
            number += 1
            try:
                if len(line) > most_bytes:
                    raise UserError(f"longer than {most_bytes} bytes")
                value = check("", decode(line))
            except UserError as error:
                raise UserError(f"{path}: line {number}: {error}; {remedy}") from None
            yield value


def _is_deeper(value: Any, levels: int) -> bool:
    level = [value]
    for _ in range(levels):
        level = [inner for outer in level for inner in _values(outer) if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def _values(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


FIELD = "manifest_hash"


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest as JSON gives it back, with the hash of its content in `FIELD`, "manifest_hash"."""
    content = {name: value for name, value in json.loads(json.dumps(manifest)).items() if name != FIELD}
    return {**content, FIELD: _hash(content)}


def check_seal(manifest: Mapping[str, Any]) -> None:
    """Raise UserError unless `FIELD` ("manifest_hash") is the hash of the manifest's other fields."""
    if manifest.get(FIELD) != _hash({name: value for name, value in manifest.items() if name != FIELD}):
        raise UserError(f"{FIELD} is not the hash of its content: damaged, or changed by hand")


def sealed_by(inner: Check[Value]) -> Check[Value]:
    """Return a check of manifests: their own hash (`FIELD`) must be right, then they must pass `inner`."""

    def check(where: str, value: Any) -> Value:
        check_seal(mapping(anything)(where, value))
        return inner(where, value)

    return check


def if_sealed(inner: Check[Value]) -> Check[Value]:
    """Return a check of records: their hash must be right if it is there (users remove it to edit), then `inner`."""

    def check(where: str, value: Any) -> Value:
        if isinstance(value, Mapping) and FIELD in value:
            try:
                check_seal(value)
            except UserError as error:
                raise UserError(f"{error}; if you edited it take {FIELD} out of it") from None
        return inner(where, value)

    return check


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
