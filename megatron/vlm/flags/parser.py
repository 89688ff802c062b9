"""Megatron's parser with our flags: it says in one line what is wrong, and which flags were given."""

import argparse
import os
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NoReturn

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

from megatron.vlm.flags.lists import Standing, standings
from omnibal_ext.errors import UserError
from omnibal_ext.flags import named_otherwise, refuse_unprintable, without_defaults

USAGE = "torchrun ... -m megatron.vlm.pretrain --model NAME --plan F --data D --packs P --train-iters N --lr L [flags]"


# Megatron reads its flags' help out of the sources of its configurations, for the parser it makes itself and for ours:
# once a process is enough.
_help_of = cache(partial(ArgumentGroupFactory._get_field_docstrings, object.__new__(ArgumentGroupFactory)))
ArgumentGroupFactory._get_field_docstrings = lambda _, configuration: _help_of(configuration)


class Parser(ArgumentParser):
    """Parses `words` with our own flags (`add_own`) and all of Megatron's.

    Raises UserError for an unknown flag (with the nearest known one), a missing or wrong value, a missing flag.
    """

    def __init__(self, add_own: Callable[[ArgumentParser], ArgumentParser], words: Sequence[str]) -> None:
        super().__init__(
            usage=USAGE,
            description="Flags that preset, plan and trainer set, and those that are refused, are in docs/flags.md.",
            allow_abbrev=False,
        )
        self.words = list(words)
        add_own(self)
        self.own = frozenset(action.dest for action in self._actions)
        add_megatron_arguments(self)
        for action in self._actions:
            standing, _ = standings().get(action.dest, (None, None))
            if standing in (Standing.SET, Standing.WITHOUT_MEANING):
                action.help = SUPPRESS
            if action.type not in (None, str, int, float):
                action.type = _or_value_error(action.type, action.dest.replace("_", "-"))

    def error(self, message: str) -> NoReturn:
        """What argparse finds wrong."""
        raise UserError(f"{message.removeprefix('argument ')}; see --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, of `words`; what is missed is said where all flags are known."""
        words = self.words if args is None else args
        if unknown := [w for w in words if w[:2] == "--" and w.partition("=")[0] not in self._option_string_actions]:
            raise UserError(self._unknown(unknown))
        found, rest = self.parse_known_args(words, namespace)
        if rest:
            raise UserError(self._unknown(rest))
        return found

    def given(self) -> Namespace:
        """The flags that stand on the command line, and no others: parsed once with all defaults left out."""
        if {"-h", "--help"} & set(self.words):  # texts of help name the defaults
            self.print_help()
            self.exit()
        refuse_unprintable(self.words)
        with without_defaults(self):
            return self.parse_args(namespace=Namespace())

    def written(self, name: str) -> str:
        """How the flag of an attribute is written: as the user did, else by its first name."""
        options = [option for action in self._actions if action.dest == name for option in action.option_strings]
        used = [word.partition("=")[0] for word in self.words]
        return next((option for option in options if option in used), options[0])

    def print_help(self, file: Any = None) -> None:
        """Once, by the first rank."""
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)

    def _unknown(self, words: Sequence[str]) -> str:
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not flags:
            return f"{' '.join(words)!r} belongs to no flag; see --help"
        allowed = [word for action in self._actions if action.help != SUPPRESS for word in action.option_strings]
        said = named_otherwise(flags[0], allowed)
        return f"{flags[0]}: no such flag; {f'{said}, all are in --help' if said else 'see --help'}"


def _or_value_error(read: Any, name: str) -> Callable[[str], Any]:
    """What reads a flag's value, failing as argparse expects it, whatever it fails with."""

    def reading(text: str) -> Any:
        try:
            return read(text)
        except Exception as error:
            raise ValueError(text) from error

    reading.__name__ = name
    return reading


def megatron_actions() -> list[argparse.Action]:
    """The flags of the installed Megatron, without --help."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser._actions
