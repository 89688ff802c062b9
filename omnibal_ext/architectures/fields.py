"""Fields of models as plain data: which of them a model's hash is made of, and what ranks fill up."""

import dataclasses
from typing import Any

LATER = {"later": True}
"""Of a field that models had none of at first: it changes the hash of those alone where it is not the default."""


def hashed(value: Any) -> Any:
    """Fields by name, without those that came `LATER` and say nothing."""
    if not dataclasses.is_dataclass(value):
        return value
    fields = [(one, getattr(value, one.name)) for one in dataclasses.fields(value)]
    return {one.name: hashed(found) for one, found in fields if not (one.metadata and found == one.default)}


def filled_up(count: int, ranks: int) -> int:
    """The next number that `ranks` divides."""
    return -(-count // ranks) * ranks
