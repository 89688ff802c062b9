"""A manifest carries the hash of its own content: what was changed since it was written is not believed."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import Check, Value, anything, mapping

FIELD = "manifest_hash"


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest as JSON will hold it, with its hash."""
    content = {name: value for name, value in json.loads(json.dumps(manifest)).items() if name != FIELD}
    return {**content, FIELD: _hash(content)}


def check_seal(manifest: Mapping[str, Any]) -> None:
    """Raise UserError unless the hash is that of the rest."""
    if manifest.get(FIELD) != _hash({name: value for name, value in manifest.items() if name != FIELD}):
        raise UserError(f"{FIELD} is not the hash of its content: damaged, or changed by hand")


def check_if_sealed(record: Any, remedy: str) -> None:
    """The same of a record that may be edited by hand, its hash taken out."""
    if not isinstance(record, Mapping) or FIELD not in record:
        return
    try:
        check_seal(record)
    except UserError as error:
        raise UserError(f"{error}; {remedy}, or if you edited it take {FIELD} out of it") from None


def sealed_by(inner: Check[Value]) -> Check[Value]:
    """A check of manifests: an object with the hash of its content, which then is what the inner check wants."""

    def check(place: str, value: Any) -> Value:
        check_seal(mapping(anything)(place, value))
        return inner(place, value)

    return check


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
