"""Sandbox in which chat templates run, as transformers' `apply_chat_template` runs them.

A template is anyone's program. Its time and memory are limited from outside (`omnibal_ext.reading.costs`), which stops
any loop; here what would compute without end in one step is taken away, which is arithmetic with long numbers, and what
writes something else each time.
"""

from functools import cache
from json import dumps
from typing import Any

from jinja2 import TemplateError
from jinja2.filters import do_int, do_round
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron.vlm.data.turns import as_json

DATE = "\U0010fffc"
"""A character of no meaning, in place of the day's date."""
BITS, DIGITS = 2**12, 1000
"""Length of the longest numbers that are multiplied, and that are read from texts."""


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**"))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return values of `loop` unchecked: they are harmless, and to check each takes long."""
        if type(obj) is LoopContext and hasattr(LoopContext, attribute) and not attribute.startswith("_"):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse all attributes of numbers: `from_bytes` makes long ones."""
        return not isinstance(obj, int | float | bytes) and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse products and powers that are long numbers."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * right
            if bits > BITS:
                raise TemplateError(f"computes a number of more than {BITS} bits")
        return super().call_binop(context, operator, left, right)


@cache
def sandbox() -> ImmutableSandboxedEnvironment:
    """Return the environment of all chat templates."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda _: DATE}
    own: dict[str, Any] = {"tojson": _tojson, "int": _whole, "round": _rounded}
    environment.filters.update(own)
    del environment.globals["lipsum"], environment.filters["random"]
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **spaces: Any) -> str:
    return dumps(value, ensure_ascii=ensure_ascii, **spaces) if ensure_ascii or spaces else as_json(value)


def _whole(value: Any, default: int = 0, base: int = 10) -> int:
    if isinstance(value, str) and len(value) > DIGITS:
        raise TemplateError(f"reads a number of more than {DIGITS} digits")
    return do_int(value, default, base)


def _rounded(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > DIGITS:
        raise TemplateError(f"rounds to more than {DIGITS} digits")
    return do_round(value, precision, method)


def _refuse(message: str) -> None:
    raise TemplateError(message)
