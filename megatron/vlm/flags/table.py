"""docs/flags.md, from the lists."""

from collections import defaultdict
from collections.abc import Iterator

from megatron.vlm.flags.group import Group
from megatron.vlm.flags.lists import LISTS, Standing
from megatron.vlm.flags.parser import megatron_actions

TITLES = {
    Standing.OBEYED: ("Obeyed", "shown by"),
    Standing.SET: ("Set", "by what, and what to change"),
    Standing.WITHOUT_MEANING: ("Without meaning here", "why"),
    Standing.UNTESTED: ("Untested", "what it is about"),
}


def document() -> str:
    """The page: one table a list."""
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


def _options() -> dict[str, list[str]]:
    """How each flag is written, by its attribute name."""
    options: defaultdict[str, list[str]] = defaultdict(list)
    for action in megatron_actions():
        options[action.dest] += action.option_strings
    return options


def _row(standing: Standing, group: Group, options: dict[str, list[str]]) -> str:
    flags = ", ".join(f"`{option}`" for name in group.flags for option in options[name])
    only = f" (only {' or '.join(map(str, group.only))})" if group.only else ""
    reason = f"`{group.reason}`" if standing is Standing.OBEYED else group.reason
    return f"| {flags}{only} | {reason} |"
