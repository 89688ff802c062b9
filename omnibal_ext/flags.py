"""Which numbers flags take, and what else must hold for a flag to be obeyed: tables, checked before anything starts."""

import argparse
import math
import re
import sys
import unicodedata
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NoReturn

from omnibal_ext.errors import UserError
from omnibal_ext.flag_synonyms import SYNONYMS, suggestion

INTERVAL = re.compile(r"([\[(])(\S+), (\S+)([])])")


@dataclass(frozen=True)
class Interval:
    """Flags that take the numbers of an interval, written as in mathematics: "[0, 1)" is 0 and all below 1.

    `names` are attribute names, separated by white space. What is not a number is in no interval.
    """

    interval: str
    names: str

    @property
    def ends(self) -> tuple[str, str, str, str]:
        """Its parts as they are written: bracket, least, most, bracket."""
        parts = INTERVAL.fullmatch(self.interval)
        assert parts, self.interval
        return parts[1], parts[2], parts[3], parts[4]

    def holds(self, value: float) -> bool:
        """Whether a number lies in the interval."""
        left, least, most, right = self.ends
        above = value >= float(least) if left == "[" else value > float(least)
        return above and (value <= float(most) if right == "]" else value < float(most))

    @property
    def wanted(self) -> str:
        """The interval in words."""
        left, least, most, right = self.ends
        low = f"{'at least' if left == '[' else 'above'} {least}"
        high = f"{'at most' if right == ']' else 'below'} {most}"
        return low if most == "inf" else f"{low} and {high}"


@dataclass(frozen=True)
class Need:
    """Flags that, as they are given, would change nothing or break the run unless something else holds.

    `needs` says what, and how to have it; `holds` sees the values of all flags, defaults included.
    """

    names: str
    needs: str
    holds: Callable[[Namespace], bool]


class _Forwarded(argparse.Action):
    """A flag of the program that is started: it is kept as any other, and joins the words behind --."""

    def __init__(self, of: argparse.Action) -> None:
        self.given = of.const
        taken = {name: getattr(of, name) for name in ("option_strings", "dest", "type", "choices", "metavar", "help")}
        super().__init__(nargs=of.nargs, **taken)

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        words = getattr(namespace, parser.behind)
        if twice := set(self.option_strings) & {word.partition("=")[0] for word in words}:
            raise UserError(f"{twice.pop()} is given twice (on both sides of --, or before it); give it once")
        valued = values if isinstance(values, list) else [values]
        words += [option_string, *map(str, valued)]
        setattr(namespace, self.dest, self.given if self.nargs == 0 else values)


class ToolParser(ArgumentParser):
    """The command line of a tool. What is wrong with it is a `UserError`: one line.

    numbers: the interval of every flag that takes numbers; needs: what else must hold for a flag to be obeyed; behind:
    whose flags follow --, as words that the attribute of that name has.
    """

    program: ClassVar[str | None] = None
    """How the user has called it, where that was not by its file."""

    def __init__(
        self, *, numbers: Sequence[Interval] = (), needs: Sequence[Need] = (), behind: str = "", **named: Any
    ) -> None:
        super().__init__(**{"prog": self.program, **named})
        self.numbers, self.needs, self.behind = tuple(numbers), tuple(needs), behind

    def error(self, message: str) -> NoReturn:
        """What argparse finds wrong."""
        raise UserError(f"{message.removeprefix('argument ')}; see --help")

    def add_forwarded(self, title: str, add: Callable[[ArgumentParser], None]) -> None:
        """Take the flags that `add` gives a parser, in a group of that title, for the program whose flags follow --."""
        declared, group = ArgumentParser(add_help=False), self.add_argument_group(title)
        add(declared)
        for action in declared._actions:
            group._add_action(_Forwarded(action))

    @property
    def forwarded(self) -> set[str]:
        """The flags that may as well stand behind --."""
        return {word for action in self._actions if isinstance(action, _Forwarded) for word in action.option_strings}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, once all words are known; then the tables hold."""
        words = [*sys.argv[1:]] if args is None else [*args]
        if self.behind:
            end = words.index("--") if "--" in words else len(words)
            namespace = namespace or Namespace()
            setattr(namespace, self.behind, [word for word in words[end:] if word != "--"])
            words = words[:end]
        self._refuse_unknown(words)
        found, rest = self.parse_known_args(words, namespace)
        if rest:
            raise UserError(f"{' '.join(rest)!r} belongs to no flag; see --help")
        given = {name: value for name, value in vars(found).items() if value != self.get_default(name)}
        refuse(outside_intervals(vars(found), self.numbers, self.written))
        refuse(needs_missing(given, found, self.needs, self.written))
        return found

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """All at once, and before anything is missed that a mistyped word took along."""
        refusals = []
        options = [option for action in self._actions for option in action.option_strings]
        for word in words:
            flag = word.partition("=")[0]
            # The beginning of a flag will do, except where it could as well be one of those behind --.
            known = flag in options if self.behind else any(option.startswith(flag) for option in options)
            if known or not flag.startswith("--"):
                continue
            ours = SYNONYMS.get(flag, "").partition(" ")[0] in options
            follow = f"flags of {self.behind.title()}'s follow --" if self.behind and not ours else ""
            hints = ", ".join(filter(None, (suggestion(flag, options), follow)))
            refusals.append(f"{flag}: no such flag; {hints or 'see --help'}")
        refuse(refusals)

    def written(self, name: str) -> str:
        """How the flag of an attribute is written."""
        return next(action.option_strings[0] for action in self._actions if action.dest == name)


def refuse(lines: Iterable[str]) -> None:
    """Raise UserError where there are any, with them all."""
    if said := [*dict.fromkeys(lines)]:
        raise UserError(*said)


def refuse_unprintable(words: Iterable[str]) -> None:
    """Raise UserError for a word that would steer the terminal or forge lines of a log where a program prints it."""
    for word in words:
        if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in word):
            raise UserError(f"{word[:200]}: has characters that are not to be seen in a log; rename it")


def flag_name(name: str) -> str:
    """How the flag of an attribute is written, unless it was named otherwise."""
    return f"--{name.replace('_', '-')}"


def outside_intervals(
    given: Mapping[str, Any], table: Iterable[Interval], written: Callable[[str], str] = flag_name
) -> list[str]:
    """A line for every given value that lies outside its flag's interval."""
    intervals = {name: numbers for numbers in table for name in numbers.names.split()}
    return [
        f"{written(name)} must be {_finite(value)}{intervals[name].wanted}, got {value}"
        for name, values in given.items()
        if name in intervals
        for value in (values if isinstance(values, list) else [values])
        if value is not None and not intervals[name].holds(value)
    ]


def needs_missing(
    given: Mapping[str, Any], values: Namespace, table: Iterable[Need], written: Callable[[str], str]
) -> list[str]:
    """A line for every given flag that lacks what it needs.

    `given` are those that the user set to something else than it would be anyway, `values` those of all flags.
    """
    return [
        f"{flag_with_value(written(name), given[name])} needs {need.needs}"
        for need in table
        for name in need.names.split()
        if name in given and not need.holds(values)
    ]


def _finite(value: float) -> str:
    return "finite and " if isinstance(value, float) and not math.isfinite(value) else ""


def shown(value: object) -> str:
    """A flag's value as it is written: signals by their names."""
    return value.name if isinstance(value, Enum) else str(value)


def flag_with_value(flag: str, value: object) -> str:
    """A flag and its value or values, as they are written."""
    if isinstance(value, list):
        return " ".join([flag, *map(shown, value)])
    return flag if isinstance(value, bool) else f"{flag} {shown(value)}"


def as_flags(values: Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Flags that another program takes as this one does, and their values; those that are None are left out."""
    return {flag_name(name): value for name in names if (value := getattr(values, name)) is not None}


@contextmanager
def without_defaults(parser: ArgumentParser) -> Iterator[None]:
    """Meanwhile the parser finds those flags alone that stand on the command line."""
    defaults = [(action, action.default) for action in parser._actions]
    for action, _ in defaults:
        action.default = SUPPRESS
    try:
        yield
    finally:
        for action, default in defaults:
            action.default = default


def flag_value(flag: str, words: Sequence[str]) -> str | None:
    """What a command line gives a flag that takes one word, "" where that is left out; the last time counts."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="given", nargs="?", const="")
    given: str | None = parser.parse_known_args(words)[0].given
    return given


def takes_numbers(action: argparse.Action) -> bool:
    """Whether a flag takes any number, and no choice of some."""
    return action.type in (int, float) and action.choices is None


def is_integer(number: float) -> bool:
    """Whether a number that was written as any is a whole one."""
    return math.isfinite(number) and number == int(number)
