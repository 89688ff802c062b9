"""Refuses flags that would not be obeyed, a line each."""

from argparse import Namespace

from megatron.vlm.flags.lists import ONLY, SET_BY, UNTESTED, each
from megatron.vlm.flags.needs import NEEDS, NUMBERS
from megatron.vlm.flags.parser import Parser
from omnibal_ext.flags import flag_with_value, needs_missing, outside_intervals, shown


def refused_values(
    given: Namespace, parser: Parser, is_model_known: bool = True, is_plan_known: bool = True
) -> list[str]:
    """Return refusals of values that differ from a fixed one, are unsupported, or out of range.

    The defaults of `parser` are the values that model, plan, machine and trainer set. If the model is unknown, every
    flag that it sets is refused; if the plan is unknown, flags that it sets are not compared.
    """
    compared = {name: value for name, value in vars(given).items() if is_plan_known or not _is_of_plan(name)}
    refusals = [_refusal(name, value, parser, is_model_known) for name, value in compared.items()]
    return [*filter(None, refusals), *outside_intervals(vars(given), NUMBERS, parser.written)]


def missing_needs(given: Namespace, args: Namespace, parser: Parser) -> list[str]:
    """Return unmet needs of the given flags; `args`: all flags, before Megatron validates them."""
    changed = {name: value for name, value in vars(given).items() if not _same(value, parser.get_default(name))}
    return needs_missing(changed, args, NEEDS, parser.written)


def untested(given: Namespace, parser: Parser) -> tuple[str, ...]:
    """Return the given flags that are in `UNTESTED`, as the user wrote them."""
    return tuple(parser.written(name) for name in vars(given) if name in each(UNTESTED))


def _is_of_plan(name: str) -> bool:
    return SET_BY.get(name, "").startswith("--plan")


def _refusal(name: str, value: object, parser: Parser, is_model_known: bool) -> str:
    """Return why this value of a flag is refused; "" if it is not."""
    flag = flag_with_value(parser.written(name), value)
    if name in ONLY and value not in ONLY[name]:
        return f"{flag}: only {' or '.join(map(shown, ONLY[name]))}; other values are not supported"
    by, default = SET_BY.get(name, ""), parser.get_default(name)
    if by.startswith("--") and not is_model_known:
        return f"{flag}: it is set by {by}"
    return f"{flag}: {_text(default)}, set by {by}" if by and not _same(value, default) else ""


def _text(value: object) -> str:
    return "it stays off" if value is None or value is False else f"it is {value}"


def _same(value: object, default: object) -> bool:
    """Whether two values are equal; argparse may hold a default as text until it is used."""
    return value == default or str(value) == str(default)
