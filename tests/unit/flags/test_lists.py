"""Every flag of the installed Megatron stands in exactly one list, with its reason; the documentation is the lists."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from megatron.vlm.flags.group import Group
from megatron.vlm.flags.lists import LISTS, Standing
from megatron.vlm.flags.parser import megatron_actions
from megatron.vlm.flags.table import document

ROOT = Path(__file__).parents[3]
LISTED = Counter(flag for groups in LISTS.values() for group in groups for flag in group.flags)
INSTALLED = {action.dest for action in megatron_actions()}


def test_every_flag_of_the_installed_parser_stands_in_a_list() -> None:
    assert sorted(INSTALLED - set(LISTED)) == []


def test_no_flag_stands_in_two_lists() -> None:
    assert [flag for flag, times in LISTED.items() if times > 1] == []


def test_no_list_names_a_flag_that_the_parser_does_not_have() -> None:
    assert sorted(set(LISTED) - INSTALLED) == []


def test_every_group_has_a_reason_and_flags() -> None:
    assert all(group.reason and group.flags for groups in LISTS.values() for group in groups)


@pytest.mark.parametrize("group", LISTS[Standing.OBEYED], ids=lambda group: group.flags[0])
def test_what_is_obeyed_names_a_test_that_exists(group: Group) -> None:
    path, _, function = group.reason.partition("::")
    names = [node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)]
    assert function.startswith("test_")
    assert function in names


def test_the_documentation_is_printed_from_the_lists() -> None:
    written = (ROOT / "docs/flags.md").read_text()
    assert written == document(), "print it again: python -m megatron.vlm.flags > docs/flags.md"
