"""Megatron's argument parser with our flags; says each error, and each flag that would not be obeyed, in one line."""

import os
import traceback
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

from megatron.vlm.flags.lists import ALLOWED, ONLY, SET_BY, UNTESTED, each, instead_of
from megatron.vlm.flags.needs import NEEDS, NUMBERS
from omnibal_ext.errors import UserError
from omnibal_ext.flags import (
    SYNONYMS,
    flag_with_value,
    needs_missing,
    outside_intervals,
    refuse_unprintable,
    shown,
    suggestion,
    without_defaults,
)

USAGE = "torchrun ... -m megatron.vlm.pretrain --model NAME --plan F --data D --packs P --train-iters N --lr L [flags]"


# Megatron extracts its flags' help from source files whenever a parser is made; cache it.
_help_of = cache(partial(ArgumentGroupFactory._get_field_docstrings, object.__new__(ArgumentGroupFactory)))
ArgumentGroupFactory._get_field_docstrings = lambda _, configuration: _help_of(configuration)


class Parser(ArgumentParser):
    """Parses `words` with our own flags (`add_own`) and Megatron's that may be given.

    refused: a line for each other flag among the words; these are not parsed.

    Raises UserError, including these lines, for a missing or wrong value and for a word that belongs to no flag.
    """

    def __init__(self, add_own: Callable[[ArgumentParser], ArgumentParser], words: Sequence[str]) -> None:
        super().__init__(
            usage=USAGE,
            description="Flags of Megatron's that are not here are refused, or set: docs/flags.md.",
            allow_abbrev=False,
        )
        self.words = list(words)
        add_own(self)
        self.own = frozenset(action.dest for action in self._actions)
        add_megatron_arguments(self)
        explained = {*self.own, *ALLOWED}
        for action in self._actions:
            if action.dest not in explained:
                action.help = SUPPRESS
            if action.type not in (None, str, int, float):
                action.type = _or_value_error(action.type, action.dest.replace("_", "-"))
        refusals = [(few, self._refusal(few)) for few in _by_flag(self.words)]
        self.kept = [word for few, refusal in refusals if not refusal for word in few]
        self.refused = [*dict.fromkeys(refusal for _, refusal in refusals if refusal)]

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a UserError."""
        raise UserError(*self.refused, f"{message.removeprefix('argument ')}; see --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the `words` that are not refused."""
        found, rest = super().parse_known_args(self.kept if args is None else args, namespace)
        if rest:
            raise UserError(*self.refused, f"{' '.join(rest)!r} belongs to no flag; see --help")
        return found, rest

    def given(self) -> Namespace:
        """Return the flags on the command line, without defaults; for --help print the help and exit."""
        if {"-h", "--help"} & set(self.words):  # help texts need the defaults
            self.print_help()
            self.exit()
        refuse_unprintable(self.words)
        with without_defaults(self):
            return self.parse_args(namespace=Namespace())

    def written(self, name: str) -> str:
        """Return an attribute's flag as the user wrote it; if it was not given, the first of its names."""
        options = [option for action in self._actions if action.dest == name for option in action.option_strings]
        used = [word.partition("=")[0] for word in self.words]
        return next((option for option in options if option in used), options[0])

    def print_help(self, file: Any = None) -> None:
        """Print help on the first rank only."""
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)

    def _refusal(self, words: Sequence[str]) -> str:
        """Return why a flag (with its values) may not be given at all; "" if it may."""
        flag = words[0].partition("=")[0]
        if not flag.startswith("--"):
            return ""
        allowed = [word for action in self._actions if action.help != SUPPRESS for word in action.option_strings]
        action = self._option_string_actions.get(flag)
        if action is None:
            return f"{flag}: no such flag; {suggestion(flag, allowed) or 'see --help'}"
        if action.dest in self.own or action.dest in ALLOWED or action.dest in SET_BY:
            return ""
        hint = "" if flag in SYNONYMS else instead_of(flag)
        hint = hint or suggestion(flag, allowed, near=0.75) or "leave it out (docs/flags.md has those that are)"
        return f"{' '.join(words)}: not obeyed; {hint}"


def _by_flag(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield each flag of a command line with its values."""
    starts = [number for number, word in enumerate(words) if word.startswith("--") or number == 0]
    for start, end in pairwise([*starts, len(words)]):
        yield list(words[start:end])


def _or_value_error(read: Any, name: str) -> Callable[[str], Any]:
    """Wrap a flag's type function so that any exception becomes the ValueError that argparse expects."""

    def reading(text: str) -> Any:
        try:
            return read(text)
        except Exception as error:
            raise ValueError(text) from error

    reading.__name__ = name
    return reading


@contextmanager
def megatron_refusals() -> Iterator[None]:
    """Turn any exception of Megatron's parsing and validation into a UserError, inside the block."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"Megatron refuses these flags: {_said(error)}") from error


def _said(error: Exception) -> str:
    """Return the error's text in one line; for an assertion without text, its condition and place."""
    if text := " ".join(str(error).split()):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    condition = (frame.line or "").removeprefix("assert ").replace("args.", "")
    return f"{condition} does not hold ({Path(frame.filename).name}:{frame.lineno})"


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
    """Return a line for each unmet need of given flags that are not defaults; `args`: all flags, unvalidated."""
    changed = {name: value for name, value in vars(given).items() if not _same(value, parser.get_default(name))}
    return needs_missing(changed, args, NEEDS, parser.written)


def untested(given: Namespace, parser: Parser) -> tuple[str, ...]:
    """Return the given flags that are passed on to Megatron untested, as the user wrote them."""
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
    """Say whether two values are equal; argparse may hold a default as text until it is used."""
    return value == default or str(value) == str(default)
