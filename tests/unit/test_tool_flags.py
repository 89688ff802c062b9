"""The command lines of our tools: every number has an interval; what is wrong is one line before anything is done."""

import importlib
import json
import math
import sys
from argparse import Action
from pathlib import Path
from typing import Any

import pytest

from omnibal_ext import flags
from omnibal_ext.errors import UserError
from omnibal_ext.flags import ToolParser, outside_intervals
from tests.unit.flags.test_numbers import edges
from tools.__main__ import COMMANDS

TOOLS = sorted(path.stem for path in Path(flags.__file__).parents[1].glob("tools/[a-z]*.py"))
CHECKED_AS_READ = {"budgets", "schedule", "tower", "schedules", "widths"}
"""What is checked, item by item, by what reads the text."""
NEEDS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("tool_flags.json").read_text())
"""Of each tool what is said of a flag, and words in which one is refused so."""
REQUIRED = {
    "launch": ["--model", "tiny", "--run-dir", "run", "--data", "data", "--packs", "packs"],
    "preprocess_data": ["--input", "chat.jsonl", "--output-dir", "data"],
    "look": ["sizes.npz"],
    "pack_data": ["--sizes", "sizes.json", "--output-dir", "packs"],
    "profile_layers": ["--model", "tiny", "--vit-budget", "1", "--llm-budget", "1", "--output", "profile.json"],
    "plan_layout": ["--output", "plan.json"],
}


class ParsedError(Exception):
    """What a tool makes of its command line."""


def parser_of(tool: str, monkeypatch: pytest.MonkeyPatch) -> ToolParser:
    """The parser that a tool asks, found as a user would: by running it."""

    def caught(self: ToolParser, *_: Any) -> None:
        raise ParsedError(self)

    monkeypatch.setattr(sys, "argv", [tool])
    with monkeypatch.context() as patched:
        patched.setattr(ToolParser, "parse_args", caught)
        with pytest.raises(ParsedError) as found:
            importlib.import_module(f"tools.{tool}").main()
    parser = found.value.args[0]
    assert isinstance(parser, ToolParser)
    return parser


def numbers_of(parser: ToolParser) -> dict[str, Action]:
    actions = {action.dest: action for action in parser._actions}
    return {name: a for name, a in actions.items() if a.type not in (None, str, Path) and name not in CHECKED_AS_READ}


def test_every_tool_is_looked_at() -> None:
    assert {command.file.removesuffix(".py") for command in COMMANDS.values()} <= set(TOOLS)
    assert set(NEEDS) == set(REQUIRED)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_number_has_one_interval_and_is_held_to_it(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = parser_of(tool, monkeypatch)
    actions = numbers_of(parser)
    named = [name for numbers in parser.numbers for name in numbers.names.split()]
    assert sorted(named) == sorted(actions)
    for numbers in parser.numbers:
        for name in numbers.names.split():
            inside, outside = edges(numbers, actions[name].type is not float)
            default = actions[name].default
            assert outside_intervals({name: None if default == "auto" else default}, parser.numbers) == []
            for value in inside:
                assert outside_intervals({name: value}, parser.numbers) == []
            if math.isinf(float(numbers.ends[2])) and numbers.ends[3] == "]":
                outside = [value for value in outside if value != math.inf]
            for value in outside:
                assert "must be " in "".join(outside_intervals({name: value}, parser.numbers))


@pytest.mark.parametrize(
    ("tool", "need", "words"),
    [(tool, need, words) for tool, needs in NEEDS.items() for need, many in needs.items() for words in many],
)
def test_what_would_not_be_obeyed_is_refused(
    tool: str, need: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [tool, *REQUIRED[tool], *words.split()])
    with pytest.raises(UserError) as refused:
        importlib.import_module(f"tools.{tool}").main()
    flag, said, _ = str(refused.value).partition(f" {need}")
    assert said, str(refused.value)
    assert flag.split()[0] in words.split()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("tool", NEEDS)
def test_every_need_is_tried(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = parser_of(tool, monkeypatch)
    tried = {word for many in NEEDS[tool].values() for words in many for word in words.split()}
    for need in parser.needs:
        for name in need.names.split():
            assert parser.written(name) in tried, name


@pytest.mark.parametrize("tool", TOOLS)
def test_a_wrong_word_is_one_line(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [tool, *REQUIRED.get(tool, []), "--no-such-flag\n"])
    with pytest.raises(UserError) as refused:
        importlib.import_module(f"tools.{tool}").main()
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("--no-such-flag\\n: no such flag; ")


def test_given_as_it_is_anyway_a_flag_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = parser_of("launch", monkeypatch)
    parser.parse_args([*REQUIRED["launch"], "--workers", "1", "--method", "joint", "--plan", "p.json", "--nnodes", "1"])
