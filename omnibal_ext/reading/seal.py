"""Manifests with the hash of their own content, so that damage and changes by hand are detected."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import Check, Value, anything, mapping

FIELD = "manifest_hash"


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with JSON types, and the hash of its content in `FIELD`."""
    content = {name: value for name, value in json.loads(json.dumps(manifest)).items() if name != FIELD}
    return {**content, FIELD: _hash(content)}


def check_seal(manifest: Mapping[str, Any]) -> None:
    """Raise UserError unless the hash in `FIELD` is that of the other fields."""
    if manifest.get(FIELD) != _hash({name: value for name, value in manifest.items() if name != FIELD}):
        raise UserError(f"{FIELD} is not the hash of its content: damaged, or changed by hand")


def check_if_sealed(record: Any) -> None:
    """`check_seal`, for a record that users may edit after removing the hash."""
    if not isinstance(record, Mapping) or FIELD not in record:
        return
    try:
        check_seal(record)
    except UserError as error:
        raise UserError(f"{error}; if you edited it take {FIELD} out of it") from None


def sealed_by(inner: Check[Value]) -> Check[Value]:
    """A check of manifests: the hash must be right, and then the inner check must pass."""

    def check(place: str, value: Any) -> Value:
        check_seal(mapping(anything)(place, value))
        return inner(place, value)

    return check


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
