"""Makes docs/flags.md of the tables of flags: `python -m tests.flag_page > docs/flags.md`."""

import argparse
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Iterator, Mapping

from megatron.training.arguments import add_megatron_arguments

from megatron.vlm.flags.lists import INSTEAD, OBEYED, ONLY, SET, UNTESTED
from megatron.vlm.flags.needs import NEEDS, NUMBERS
from omnibal_ext.flags import flag_name, shown

HEAD = """# Flags of Megatron

For those who bring a Megatron-LM command line: which of its flags work here. Flags in the first three lists may be
given; every other flag of megatron-core's parser is refused, all of a command line together, a line each.
`python -m megatron.vlm.pretrain --help` explains the flags that may be given, and our own. This page is printed by
`python -m tests.flag_page > docs/flags.md`."""
SECTIONS: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    ("Obeyed", "These do what Megatron says; the named test shows it.", "shown by", OBEYED),
    ("Set", "The value that is set is accepted; another one is refused.", "by what, and what to change", SET),
    ("Untested", "Megatron's own, not touched by our code and not run by our tests: passed on, and named in the log.",
     "what it is about", UNTESTED),
    ("Refused", "All others. For these (`*`: anything) the line says what to do instead, else the nearest flag.",
     "instead", INSTEAD),
)  # fmt: skip


def megatron_actions() -> list[argparse.Action]:
    """Return the flags of the installed Megatron, without --help."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    add_megatron_arguments(parser)
    return parser._actions


def document() -> str:
    """Return the page: a table for each list, one of numbers, one of needs."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    options: defaultdict[str, list[str]] = defaultdict(list)
    for action in megatron_actions():
        options[action.dest] += action.option_strings
    yield HEAD
    for title, what, column, table in SECTIONS:
        yield from ("", f"## {title}", "", what, "", f"| flags | {column} |", "|---|---|")
        yield from (f"| {_written(flags, options)} | {_said(reason)} |" for reason, flags in table.items())
    yield from ("", "## Numbers", "", "What each flag takes, ours and Megatron's; other numbers are refused.")
    yield from ("", "| from, to | flags |", "|---|---|")
    taken: defaultdict[str, list[str]] = defaultdict(list)
    for numbers in NUMBERS:
        taken[numbers.interval].append(numbers.names)
    yield from (f"| {interval} | {_written(' '.join(names), options)} |" for interval, names in taken.items())
    yield from ("", "## Needs", "", "What a flag needs to have an effect; without it the flag is refused.")
    yield from ("", "| flags | what they need |", "|---|---|")
    yield from (f"| {_written(need.names, options)} | {need.needs} |" for need in NEEDS)


def _said(reason: str) -> str:
    return f"`{reason}`" if reason in OBEYED else reason


def _written(names: str, options: Mapping[str, list[str]]) -> str:
    """Return flags as written on a command line, with their supported values; `options`: Megatron's flags."""
    found = [(name, options.get(name, [name if "-" in name else flag_name(name)])) for name in names.split()]
    return ", ".join(f"`{option}`{_only(name)}" for name, written in found for option in written)


def _only(name: str) -> str:
    return f" (only {' or '.join(map(shown, ONLY[name]))})" if name in ONLY else ""


if __name__ == "__main__":
    print(document(), end="")
