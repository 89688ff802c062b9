"""Cases of which the short suite runs some, and `scripts/test.sh --long` all."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet

Value = TypeVar("Value")


def short(values: Iterable[Value], kept: Collection[Value]) -> list[ParameterSet]:
    """Parameters of a test: the `kept` ones always, all others marked `long`."""
    values = list(values)
    assert set(kept) <= set(values), "what is kept must be among them"
    marks = {value: () if value in kept else (pytest.mark.long,) for value in values}
    return [pytest.param(value, marks=marks[value]) for value in values]


def short_launches(launches: Mapping[str, Any]) -> list[ParameterSet]:
    """Names of launches on ranks, those marked `long` that are (`is_long`)."""
    return short(launches, [name for name, launch in launches.items() if not launch.is_long])
