"""A flag of the installed Megatron may be given, is set, or is refused in a line that says what to do instead."""

import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

from megatron.vlm.arguments import add_vlm_arguments
from megatron.vlm.flags.lists import ALLOWED, INSTEAD, OBEYED, ONLY, SET, SET_BY, UNTESTED
from megatron.vlm.flags.parser import Parser
from omnibal_ext.flags import SYNONYMS
from tests.flag_page import document, megatron_actions
from tests.unit.test_mutations import is_there

ROOT = Path(__file__).parents[3]
LISTED = Counter(flag for table in (OBEYED, SET, UNTESTED) for flags in table.values() for flag in flags.split())
ACTIONS = megatron_actions()
REFUSED = [option for action in ACTIONS if action.dest not in LISTED for option in action.option_strings]
OURS = {flag for room in ("tools", "omnibal_ext", "megatron/vlm/arguments.py") for path in [ROOT / room]
        for file in (path.rglob("*.py") if path.is_dir() else [path])
        for flag in re.findall(r'"(--[a-z-]+)"', file.read_text())} | {"--lr-vit", "--lr-projector"}  # fmt: skip


def test_every_flag_of_the_installed_parser_is_in_one_list_or_refused() -> None:
    assert [flag for flag, times in LISTED.items() if times > 1] == []
    assert sorted({*LISTED, *ONLY} - {action.dest for action in ACTIONS}) == []
    parser = Parser(add_vlm_arguments, [word for option in REFUSED for word in (option, "value")])
    assert parser.kept == []
    assert [line.partition(" value: not obeyed; ")[0] for line in parser.refused] == REFUSED
    offered = Parser(add_vlm_arguments, [action.option_strings[0] for action in ACTIONS if action.dest in LISTED])
    assert offered.refused == []


def test_what_is_said_instead_names_flags_that_there_are() -> None:
    theirs = {option for action in ACTIONS if action.dest in ALLOWED or action.dest in SET_BY
              for option in action.option_strings}  # fmt: skip
    said = [*INSTEAD, *SYNONYMS.values(), *Parser(add_vlm_arguments, REFUSED).refused]
    named = {flag for line in said for flag in re.findall(r"--[a-z0-9-]+", line.partition("not obeyed; ")[2] or line)}
    assert sorted(named - theirs - OURS) == []
    patterns = [pattern for many in INSTEAD.values() for pattern in many.split()]
    assert [one for one in patterns if not any(fnmatchcase(option, one) for option in REFUSED)] == []


def test_what_is_obeyed_names_a_test_that_exists() -> None:
    assert [test for test in OBEYED if not is_there(test)] == []


def test_the_documentation_is_printed_from_the_lists() -> None:
    written = (ROOT / "docs/flags.md").read_text()
    assert written == document(), "print it again: python -m tests.flag_page > docs/flags.md"
