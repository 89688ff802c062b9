"""Schemas of decoded JSON, built from checks: `record({"stages": listing(STAGE, most=64), ...})`.

A check is called with the path of a value in the document and the value. It returns the value unchanged, or raises
UserError "PATH must be ..., got ...", before which the reader of the file puts the file's name. (msgspec and pydantic
take 6 and 5 us where this takes 20, of milliseconds to read a sample, and need as long schemas. msgspec's messages lack
the value and a bound; pydantic accepts true for 1.0 and imports in 0.15 s. Both let NUL through.)
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
"""Largest number: sums and products of a few stay finite, and integers fit 64 bits."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlong = 40


def shown(value: object) -> str:
    """Return a value as one short line, for a message."""
    return _short.repr(value)


def _wrong(where: str, wanted: str, value: object) -> UserError:
    return UserError(f"{where or 'it'} must be {wanted}, got {shown(value)}")


def integer(least: int = 0, most: int = 2**53) -> Check[int]:
    """Return a check of integers from `least` to `most`; true and false are refused."""
    wanted = f"a whole number from {least} to {most}" if most < 2**53 else f"a whole number of at least {least}"

    def check(where: str, value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise _wrong(where, wanted, value)
        return value

    return check


def finite(least: float = 0.0, most: float = LARGEST) -> Check[float]:
    """Return a check of finite numbers from `least` to `most`, integers too, which returns them as floats."""
    wanted = f"a finite number of at least {least:g}" if most == LARGEST else f"a number from {least:g} to {most:g}"

    def check(where: str, value: Any) -> float:
        if not is_number(value) or not least <= value <= most:
            raise _wrong(where, wanted, value)
        return float(value)

    return check


def is_number(value: object) -> bool:
    """Say whether a value is a finite number of absolute value at most `LARGEST`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= LARGEST if isinstance(value, int) else math.isfinite(value) and abs(value) <= LARGEST


def text(where: str, value: Any) -> str:
    """Return a value that is a text, and may be a file's name: without NUL or lone surrogates. Raises UserError."""
    if not isinstance(value, str) or len(value) > MOST_TEXT or "\0" in value or not is_unicode(value):
        raise _wrong(where, "a text", value)
    return value


def is_unicode(value: str) -> bool:
    """Say whether a text is free of lone surrogates, which JSON can hold as escapes and tokenizers refuse."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def flag(where: str, value: Any) -> bool:
    """Return a value that is true or false. Raises UserError naming `where` for any other."""
    if not isinstance(value, bool):
        raise _wrong(where, "true or false", value)
    return value


def one_of(*choices: str | int) -> Check[Any]:
    """Return a check that accepts these texts and integers only; true and false are not taken for 1 and 0."""

    def check(where: str, value: Any) -> Any:
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise _wrong(where, f"one of {', '.join(map(str, choices))}", value)
        return value

    return check


def anything(where: str, value: Any) -> Any:
    """Return any value as it is: the check of fields that no program uses."""
    return value


def maybe(inner: Check[Value]) -> Check[Value | None]:
    """Return a check that accepts null, and otherwise what `inner` accepts."""

    def check(where: str, value: Any) -> Value | None:
        return None if value is None else inner(where, value)

    return check


def listing(item: Check[Value], least: int = 0, most: int = MOST_ITEMS) -> Check[list[Value]]:
    """Return a check of lists of `least` to `most` items, each of which must pass `item`."""
    wanted = f"a list of {least}" if least == most else f"a list of {least} to {most}"

    def check(where: str, value: Any) -> list[Value]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            raise _wrong(where, f"{wanted} items", value)
        return [item(f"{where}[{number}]", one) for number, one in enumerate(value)]

    return check


def mapping(item: Check[Value], most: int = MOST_ITEMS) -> Check[dict[str, Value]]:
    """Return a check of JSON objects of at most `most` fields with any names, whose values must pass `item`."""

    def check(where: str, value: Any) -> dict[str, Value]:
        if not isinstance(value, dict) or len(value) > most:
            raise _wrong(where, f"a JSON object of at most {most} fields", value)
        return {text(f"a name in {where}", name): item(_inside(where, name), one) for name, one in value.items()}

    return check


def record(required: Mapping[str, Check[Any]], optional: Mapping[str, Check[Any]] | None = None) -> Check[Any]:
    """Return a check of JSON objects with these fields, each by its own check; fields in neither pass unchecked."""

    def check(where: str, value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong(where, "a JSON object", value)
        for name, field in required.items():
            if name not in value:
                raise UserError(f"{where + ': ' if where else ''}field {name!r} is missing")
            field(_inside(where, name), value[name])
        for name, field in (optional or {}).items():
            if name in value:
                field(_inside(where, name), value[name])
        return value

    return check


def _inside(where: str, name: str) -> str:
    word = name if name.isidentifier() else shown(name)
    return f"{where}.{word}" if where else word
