"""The command lines of our tools: every number has an interval; what is wrong is one line before anything is done."""

import ast
import importlib
import json
import math
import sys
from argparse import Action
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnibal_ext import flags
from omnibal_ext.errors import UserError
from omnibal_ext.flags import ToolParser, outside_intervals
from omnibal_ext.layout.command import plan_parser
from omnibal_ext.packing.command import pack_parser
from omnibal_ext.preprocess_flags import preprocess_parser
from omnibal_ext.profile_flags import profile_parser
from omnibal_ext.reading.stores import located, store_named
from tests.programs import ROOT
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
    return {
        name: a
        for name, a in actions.items()
        if a.type not in (None, str, Path, located, store_named) and name not in CHECKED_AS_READ
    }


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


GIVEN: dict[Callable[[], ToolParser], dict[str, Any]] = {
    pack_parser: {"data": "d", "output_dir": "p", "widths": (1, 2), "vit_budget": 7, "weights": [1.0, 2.5], "wait": 0.1,
                  "separate_sources": True, "narrow_first": 2},
    plan_parser: {"output": "plan.json", "profile": "p.json", "memory_gib": 7.5, "schedule": "zb_h1"},
    profile_parser: {"model": "tiny", "vit_budget": 4, "llm_budget": 64, "output": "o", "freeze": ["vit"],
                     "bf16": True},
    preprocess_parser: {"input": [Path("a"), Path("b")], "output_dir": Path("o"), "shorten": ["truncate"],
                        "thumbnail": False, "max_rejects": 0, "image_checksums": False},
}  # fmt: skip
"""Of each tool some settings, with all kinds of values."""


@pytest.mark.parametrize("parser_of_tool", GIVEN)
def test_settings_are_those_of_the_command_line_that_gives_them(parser_of_tool: Callable[[], ToolParser]) -> None:
    parser, given = parser_of_tool(), GIVEN[parser_of_tool]
    settings = parser.settings(**given)
    assert vars(settings).items() >= given.items()
    assert parser.parse_args(parser.words(**given)) == settings
    assert parser.words(**{name: value for name, value in parser.defaults().items() if value is not None}) == []
    with pytest.raises(AssertionError):
        parser.settings(**given, no_such_flag=1)


def test_settings_are_held_to_the_tables_as_a_command_line_is() -> None:
    for wrong in ({"micro_batches": 0}, {"wait": 1.0}, {"narrow_first": 2}, {"held_out": 0.1, "held_out_of": "p"}):
        given = {"data": "d", "output_dir": "p", **wrong}
        with pytest.raises(UserError) as as_values:
            pack_parser().settings(**given)
        with pytest.raises(UserError) as as_words:
            pack_parser().parse_args(pack_parser().words(**given))
        assert str(as_values.value) == str(as_words.value)


def test_a_borrowed_flag_is_the_lender_s_but_for_what_is_said() -> None:
    borrower = ToolParser(numbers=[flags.Interval("[1, 9]", "micro_batches")])
    names = ("micro_batches", "vit_budget", "widths")
    borrower.borrow(borrower, pack_parser(), names, micro_batches={"default": 3})
    assert borrower.defaults() == {"micro_batches": 3, "vit_budget": None, "widths": (1,)}
    assert pack_parser().defaults()["micro_batches"] == 1
    assert borrower.parse_args(["--vit-budget", "5", "--widths", "1,2"]).vit_budget == 5
    for words, said in ((["--micro-batches", "10"], "at most 9"), (["--vit-budget", "-1"], "at least 0")):
        with pytest.raises(UserError, match=said):
            borrower.parse_args(words)


def test_a_size_is_declared_in_one_place() -> None:
    """Budgets in two: those of packs, which may be chosen, and those of the packs that are profiled."""
    calls = [node for room in ("tools", "omnibal_ext") for path in (ROOT / room).rglob("*.py")
             for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]  # fmt: skip
    declared = Counter(str(word.value) for call in calls for word in call.args[:1] if isinstance(word, ast.Constant)
                       and ast.unparse(call.func).split(".")[-1] in ("add", "add_argument"))  # fmt: skip
    sizes = ("tensor-model-parallel", "expert-model-parallel", "pipeline-model-parallel",
             "virtual-pipeline-model-parallel", "data-parallel")  # fmt: skip
    once = [*(f"--{size}-size" for size in sizes), "--widths", "--held-out", "--max-tiles", "--max-pixels",
            "--max-tokens", "--shorten", "--schedule", "--tower", "--recompute", "--memory-gib"]  # fmt: skip
    assert {flag: declared[flag] for flag in once} == dict.fromkeys(once, 1)
    assert declared["--vit-budget"] == declared["--llm-budget"] == declared["--micro-batches"] == 2
