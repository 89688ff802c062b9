"""Refuses what is given and would not be obeyed."""

from argparse import Namespace

from megatron.vlm.flags.lists import Standing, standings
from megatron.vlm.flags.needs import NEEDS
from megatron.vlm.flags.numbers import NUMBERS
from megatron.vlm.flags.parser import Parser
from omnibal_ext.errors import UserError
from omnibal_ext.flags import as_given, check_needs, check_numbers


def check_given(given: Namespace, parser: Parser) -> tuple[str, ...]:
    """The untested flags among those given, as the user wrote them.

    `parser` has the defaults that preset, plan, machine and trainer set. Raises UserError naming every flag that is
    refused: set to another value, without meaning here, or in no list (a Megatron newer than the lists); or every one
    whose number is none that it takes.
    """
    flags = {name: value for name, value in vars(given).items() if name not in parser.own}
    refusals = [refusal for name, value in flags.items() if (refusal := _refusal(name, value, parser))]
    if refusals:
        raise UserError(f"{'; '.join(refusals)} (docs/flags.md)")
    check_numbers(vars(given), NUMBERS, parser.written)
    return tuple(parser.written(name) for name in flags if standings()[name][0] is Standing.UNTESTED)


def check_together(given: Namespace, args: Namespace, parser: Parser) -> None:
    """Raise UserError naming every flag of those given that lacks what it needs; `args` are all, not validated yet."""
    changed = {name: value for name, value in vars(given).items() if not _same(value, parser.get_default(name))}
    check_needs(changed, args, NEEDS, parser.written)


def _refusal(name: str, value: object, parser: Parser) -> str | None:
    """Why this value of a flag is refused; None where it is not."""
    given = as_given(parser.written(name), value)
    if name not in standings():
        return f"{given}: not known to this project"
    standing, group = standings()[name]
    if group.only and value not in group.only:
        return f"{given}: only {group.allowed}; {_reason(standing, group.reason)}"
    if standing is Standing.SET and not _same(value, parser.get_default(name)):
        return f"{given}: {_text(parser.get_default(name))}, set by {group.reason}"
    return f"{given}: refused; {group.reason}" if standing is Standing.WITHOUT_MEANING else None


def _reason(standing: Standing, reason: str) -> str:
    return "others were not tried" if standing is Standing.OBEYED else reason


def _text(value: object) -> str:
    return "it stays off" if value is None or value is False else f"it is {value}"


def _same(value: object, default: object) -> bool:
    """Defaults may be written as text, which argparse reads only when it uses them."""
    return value == default or str(value) == str(default)
