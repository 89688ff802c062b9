"""docs/flags.md, from the lists, the numbers and the needs."""

from collections import defaultdict
from collections.abc import Iterator

from megatron.vlm.flags.group import Group
from megatron.vlm.flags.lists import LISTS, Standing
from megatron.vlm.flags.needs import NEEDS
from megatron.vlm.flags.numbers import NUMBERS
from megatron.vlm.flags.parser import megatron_actions
from omnibal_ext.flags import written_with_dashes

TITLES = {
    Standing.OBEYED: ("Obeyed", "shown by"),
    Standing.SET: ("Set", "by what, and what to change"),
    Standing.WITHOUT_MEANING: ("Without meaning here", "why"),
    Standing.UNTESTED: ("Untested", "what it is about"),
}


def document() -> str:
    """The page: one table a list, one of numbers, one of needs."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Flags of Megatron"
    yield ""
    yield "Printed by `python -m megatron.vlm.flags > docs/flags.md`. Every flag of megatron-core's parser stands in"
    yield "one of four lists; `python -m megatron.vlm.pretrain --help` explains those that may be given, and our own."
    options = _options()
    for standing, groups in LISTS.items():
        title, column = TITLES[standing]
        yield from ("", f"## {title}", "", standing.value, "", f"| flags | {column} |", "|---|---|")
        yield from (_row(standing, group, options) for group in groups)
    yield from ("", "## Numbers", "", "Those that each flag takes, our own beside Megatron's; all others are refused.")
    yield from ("", "| from, to | flags |", "|---|---|")
    taken: defaultdict[str, list[str]] = defaultdict(list)
    for numbers in NUMBERS:
        taken[numbers.interval].append(numbers.names)
    yield from (f"| {interval} | {_written(' '.join(names), options)} |" for interval, names in taken.items())
    yield from ("", "## Needs", "", "What else must hold for a flag to be obeyed; without it the flag is refused.")
    yield from ("", "| flags | what they need |", "|---|---|")
    yield from (f"| {_written(need.names, options)} | {need.needs} |" for need in NEEDS)


def _options() -> dict[str, list[str]]:
    """How each flag is written, by its attribute name."""
    options: defaultdict[str, list[str]] = defaultdict(list)
    for action in megatron_actions():
        options[action.dest] += action.option_strings
    return options


def _row(standing: Standing, group: Group, options: dict[str, list[str]]) -> str:
    flags = _written(group.names, options)
    only = f" (only {group.allowed})" if group.only else ""
    reason = f"`{group.reason}`" if standing is Standing.OBEYED else group.reason
    return f"| {flags}{only} | {reason} |"


def _written(names: str, options: dict[str, list[str]]) -> str:
    """Flags as they are written; our own are no options of Megatron's."""
    written = [option for name in names.split() for option in options.get(name, [written_with_dashes(name)])]
    return ", ".join(f"`{option}`" for option in written)
