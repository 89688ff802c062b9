"""Refuses what is given and would not be obeyed."""

from argparse import Namespace

from megatron.vlm.flags.lists import Standing, standings
from megatron.vlm.flags.parser import Parser
from omnibal_ext.errors import UserError


def check_given(given: Namespace, parser: Parser) -> tuple[str, ...]:
    """The untested flags among those given, as the user wrote them.

    `parser` has the defaults that preset, plan, machine and trainer set. Raises UserError naming every flag that is
    refused: set to another value, without meaning here, or in no list (a Megatron newer than the lists).
    """
    flags = {name: value for name, value in vars(given).items() if name not in parser.own}
    refusals = [refusal for name, value in flags.items() if (refusal := _refusal(name, value, parser))]
    if refusals:
        raise UserError(f"{'; '.join(refusals)} (docs/flags.md)")
    return tuple(parser.written(name) for name in flags if standings()[name][0] is Standing.UNTESTED)


def _refusal(name: str, value: object, parser: Parser) -> str | None:
    """Why this value of a flag is refused; None where it is not."""
    flag = parser.written(name)
    shown = flag if isinstance(value, bool) else f"{flag} {value}"
    if name not in standings():
        return f"{shown}: not known to this project"
    standing, group = standings()[name]
    if group.only and value not in group.only:
        return f"{shown}: only {' or '.join(map(str, group.only))}; {_reason(standing, group.reason)}"
    if standing is Standing.SET and not _same(value, parser.get_default(name)):
        return f"{shown}: {_text(parser.get_default(name))}, set by {group.reason}"
    return f"{shown}: refused; {group.reason}" if standing is Standing.WITHOUT_MEANING else None


def _reason(standing: Standing, reason: str) -> str:
    return "others were not tried" if standing is Standing.OBEYED else reason


def _text(value: object) -> str:
    return "it stays off" if value is None or value is False else f"it is {value}"


def _same(value: object, default: object) -> bool:
    """Defaults may be written as text, which argparse reads only when it uses them."""
    return value == default or str(value) == str(default)
