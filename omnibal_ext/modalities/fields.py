"""Fields of the dataclasses of models: which of them enter a model's hash."""

import dataclasses
from typing import Any

LATER = {"later": True}
"""Metadata of a field added later: its default does not enter the hash, so that hashes of older models stay."""
UNPRICED = {"unpriced": True}
"""Metadata of a field that affects no cost: it never enters the hash."""


def hashed(value: Any) -> Any:
    """Return a dataclass's fields by name, as a hash takes them: without `UNPRICED` (no cost depends on them), and
    without `LATER` (added later) at their default. Other values stay."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = [(one, getattr(value, one.name)) for one in dataclasses.fields(value)]
    kept = ((one, found) for one, found in fields if "unpriced" not in one.metadata)
    return {one.name: hashed(found) for one, found in kept if not (one.metadata and found == one.default)}


def filled_up(count: int, ranks: int) -> int:
    """Return `count` rounded up to a multiple of `ranks`."""
    return -(-count // ranks) * ranks
