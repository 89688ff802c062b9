"""What a decoded value must be, said as data: `record({"stages": listing(STAGE, most=64), ...})`.

A check takes the place of a value and the value, and gives it back, or raises UserError "PLACE must be ..., got ...".
Checks look and change nothing; whoever opens the file puts its name before the message. (Of msgspec and pydantic, tried
on the images of a sample: 6 and 5 us for our 20, of the milliseconds that reading it takes. The first names neither the
value nor the other bound, the second takes true for 1.0 and .15 s to import. Both let NUL through; schemas: as long.)
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from omnibal_ext.errors import UserError

Value = TypeVar("Value")
Check = Callable[[str, Any], Value]

MOST_TEXT = 2**16
MOST_ITEMS = 2**20
LARGEST = 1e18
"""Of any number: sums and products of a few stay finite, and whole ones fit 64 bits."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlong = 40


def shown(value: object) -> str:
    """A value in a message: one line, and short whatever it holds."""
    return _short.repr(value)


def _wrong(place: str, wanted: str, value: object) -> UserError:
    """What to raise for a value that is not as it must be."""
    return UserError(f"{place or 'it'} must be {wanted}, got {shown(value)}")


def integer(least: int = 0, most: int = 2**53) -> Check[int]:
    """A whole number; true and false are none."""
    wanted = f"a whole number from {least} to {most}" if most < 2**53 else f"a whole number of at least {least}"

    def check(place: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _wrong(place, wanted, value)
        return value

    return check


def finite(least: float = 0.0, most: float = LARGEST) -> Check[float]:
    """A finite number."""
    wanted = f"a finite number of at least {least:g}" if most == LARGEST else f"a number from {least:g} to {most:g}"

    def check(place: str, value: Any) -> float:
        if not is_number(value) or not least <= value <= most:
            raise _wrong(place, wanted, value)
        return float(value)

    return check


def is_number(value: object) -> bool:
    """Whether it is a number that can be computed with: finite, and no larger than `LARGEST`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST if isinstance(value, int) else math.isfinite(value) and abs(value) <= LARGEST


def text(place: str, value: Any) -> str:
    """A text that can be written down again, and be a file's name: without NUL and halves of surrogate pairs."""
    if not isinstance(value, str) or len(value) > MOST_TEXT or not is_writable(value):
        raise _wrong(place, "a text", value)
    return value


def is_writable(value: str) -> bool:
    """Whether a text can be encoded; JSON can escape half of a surrogate pair."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in value


def flag(place: str, value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise _wrong(place, "true or false", value)
    return value


def one_of(*choices: str | int) -> Check[Any]:
    """One of these texts or whole numbers."""

    def check(place: str, value: Any) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise _wrong(place, f"one of {', '.join(map(str, choices))}", value)
        return value

    return check


def anything(place: str, value: Any) -> Any:
    """Any value; for what nobody reads but people."""
    return value


def maybe(inner: Check[Value]) -> Check[Value | None]:
    """null, or what the inner check wants."""

    def check(place: str, value: Any) -> Value | None:
        return None if value is None else inner(place, value)

    return check


def listing(item: Check[Value], least: int = 0, most: int = MOST_ITEMS) -> Check[list[Value]]:
    """A list, its items alike."""
    wanted = f"a list of {least}" if least == most else f"a list of {least} to {most}"

    def check(place: str, value: Any) -> list[Value]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise _wrong(place, f"{wanted} items", value)
        return [item(f"{place}[{number}]", one) for number, one in enumerate(value)]

    return check


def mapping(item: Check[Value], most: int = MOST_ITEMS) -> Check[dict[str, Value]]:
    """An object with names of the user's own, its values alike."""

    def check(place: str, value: Any) -> dict[str, Value]:
        if not isinstance(value, dict) or len(value) > most:
            raise _wrong(place, f"a JSON object of at most {most} fields", value)
        return {text(f"a name in {place}", name): item(_inside(place, name), one) for name, one in value.items()}

    return check


def record(required: Mapping[str, Check[Any]], optional: Mapping[str, Check[Any]] | None = None) -> Check[Any]:
    """An object with these fields; those of other names pass as they are."""

    def check(place: str, value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong(place, "a JSON object", value)
        for name, field in required.items():
            if name not in value:
                raise UserError(f"{place + ': ' if place else ''}field {name!r} is missing")
            field(_inside(place, name), value[name])
        for name, field in (optional or {}).items():
            if name in value:
                field(_inside(place, name), value[name])
        return value

    return check


def _inside(place: str, name: str) -> str:
    word = name if name.isidentifier() else shown(name)
    return f"{place}.{word}" if place else word
