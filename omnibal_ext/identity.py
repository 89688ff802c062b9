"""What a dataset or packed index is, wherever its files lie: its manifest without places.

A run's folder, its data, model and images may be moved, copied or named by another path between two starts.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from omnibal_ext.reading.checks import shown
from omnibal_ext.reading.document import FIELD

PLACES = frozenset(("path", "file", "name", "origin", "image_root", "given", "chat_template", "manifest_sha256", FIELD))
"""Fields that say where something lies or what it is called, or hash such. Templates are told apart by their hash."""
BY_PATH = "sizes"
"""A field of hashes by path."""


def content_of(manifest: Any) -> Any:
    """Return a manifest, or part of one, without `PLACES`: fields of where files lie and what they are called."""
    if isinstance(manifest, list | tuple):
        return [content_of(value) for value in manifest]
    if not isinstance(manifest, Mapping):
        return manifest
    return {
        name: list(value.values()) if name == BY_PATH and isinstance(value, Mapping) else content_of(value)
        for name, value in manifest.items()
        if name not in PLACES
    }


def content_hash(manifest: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest, the same wherever its files lie (see `content_of`)."""
    return hashlib.sha256(json.dumps(content_of(manifest), sort_keys=True).encode()).hexdigest()


def differences(found: Any, wanted: Any, name: str = "") -> Iterator[str]:
    """Yield "FIELD is FOUND, not WANTED" for the innermost fields of `wanted` that `found` lacks or has otherwise."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        for key in wanted:
            yield from differences(found.get(key), wanted[key], f"{name}.{key}")
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for number, pair in enumerate(zip(found, wanted, strict=True)):
            yield from differences(*pair, f"{name}.{number}")
    elif found != wanted:
        yield f"{name.removeprefix('.')} is {shown(found)}, not {shown(wanted)}"
