"""The command lines of our tools: every number has an interval; what is wrong is one line before anything is done."""

import importlib
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
CHECKED_AS_READ = {"budgets", "schedule", "schedules", "widths"}
"""What is checked, item by item, by what reads the text."""
NEEDS = {
    "launch": [
        ("--epochs 2 -- --train-iters 5", "--epochs 2.0 needs to be given without --train-iters"),
        ("--epochs 2 -- --train-iters=5", "--epochs 2.0 needs to be given without --train-iters"),
        ("--micro-batches 4", "--micro-batches 4 needs --input"),
        ("--widths 1,2", "--widths 1,2 needs --input"),
        ("--chat-template mine", "--chat-template mine needs --input"),
        ("--nnodes 2", "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ("--plan plan.json --repack", "--repack needs to be given without --plan"),
        ("--plan plan.json --replan", "--replan needs to be given without --plan"),
        ("--repack --replan", "--replan needs to be given without --repack"),
        ("--plan plan.json --analytic a100", "--analytic a100 needs to be given without --plan"),
        ("--plan plan.json --schedule zb_h1", "--schedule zb_h1 needs to be given without --plan"),
        ("--plan plan.json --method profile", "--method profile needs to be given without --plan"),
        ("--plan plan.json --recompute full", "--recompute full needs to be given without --plan"),
        ("--plan plan.json --tower auto", "--tower auto needs to be given without --plan"),
        ("--plan plan.json --virtual-pipeline-model-parallel-size 2", "needs to be given without --plan"),
        ("--profile profile.json --analytic a100", "--analytic a100 needs to be given without --profile"),
        ("--max-tiles 6", "--max-tiles 6 needs --input"),
        ("--max-pixels 60000", "--max-pixels 60000 needs --input"),
        ("--max-tokens 600", "--max-tokens 600 needs --input"),
        ("--shorten truncate", "--shorten truncate needs --input"),
        ("--vit-budget 6", "--vit-budget 6 needs --input"),
        ("--llm-budget 600", "--llm-budget 600 needs --input"),
        ("--held-out .1", "--held-out 0.1 needs --input"),
        ("--input chat.jsonl --held-out .1 --eval-data there", "--held-out 0.1 needs to be given without --eval-data"),
        ("--no-save --save-hf", "--save-hf needs to be given without --no-save"),
        ("--no-save -- --save there", "--no-save needs to be given without --save"),
    ],
    "pack_data": [
        ("--max-llm-budget 9 --llm-budget 8", "--max-llm-budget 9 needs --llm-budget auto"),
        ("--max-llm-budget 9 --method random", "--max-llm-budget 9 needs --llm-budget auto"),
        ("--costs profile.json --analytic a100", "--analytic a100 needs to be given without --costs"),
        ("--costs profile.json --model tiny", "--model tiny needs to be given without --costs"),
        ("--narrow-first 4", "--narrow-first 4 needs --widths auto or of several ranks"),
        ("--node-ranks 4", "--node-ranks 4 needs --widths auto"),
        ("--node-ranks 4 --widths 1,2", "--node-ranks 4 needs --widths auto"),
        ("--held-out .1 --held-out-of there", "--held-out 0.1 needs to be given without --held-out-of"),
        ("--like here --held-out-of there", "--like here needs to be given without --held-out-of"),
    ],
    "look": [
        *[
            (f"{words}", f"{words} needs conversations, and --model")
            for words in (
                "--image-root there",
                "--max-tiles 6",
                "--max-pixels 60000",
                "--workers 2",
                "--save-sizes sizes.npz",
            )
        ],
        ("--model tiny --max-tiles 6", "--max-tiles 6 needs conversations, and --model"),
        ("--save-sizes sizes", "--save-sizes sizes needs a name that ends in .npz"),
        ("--max-pixels 60000 --max-tiles 9", "--max-pixels 60000 needs to be given without --max-tiles"),
        ("--order order.jsonl --micro-batches 2", "--micro-batches 2 needs to be given without --order"),
        ("--order-packed", "--order-packed needs --order"),
        ("--costs profile.json --analytic a100", "--analytic a100 needs to be given without --costs"),
    ],
    "preprocess_data": [
        ("--max-pixels 60000 --max-tiles 9", "--max-pixels 60000 needs to be given without --max-tiles"),
        ("--check --shard 0/2", "--check needs to be given without --shard or --merge"),
    ],
    "profile_layers": [
        ("--measured lines.json", "--measured lines.json needs --analytic"),
        ("--analytic a100 --steps 7", "--steps 7 needs to be given without --analytic"),
        (
            "--analytic a100 --tower-profile whole.json",
            "whole.json needs to be given without --analytic",
        ),
        ("--analytic a100 --force", "--force needs to be given without --analytic"),
        ("--lora-targets vit llm", "--lora-targets vit llm needs --lora-rank"),
        ("--lora-rank 8 --freeze vit", "--freeze vit needs to be given without --lora-rank"),
    ],
    "plan_layout": [
        *[(f"{flag} 8", f"{flag} 8 needs --sweep") for flag in ("--gpus", "--global-batch-samples")],
        ("--sizes 8", "--sizes 8 needs --sweep"),
        ("--pipeline-sizes 8", "--pipeline-sizes 8 needs --sweep"),
        ("--chunks 8", "--chunks 8 needs --sweep"),
        ("--schedules zb_h1", "needs --sweep"),
        ("--sweep --pipeline-model-parallel-size 2", "needs to be given without --sweep"),
        ("--sweep --virtual-pipeline-model-parallel-size 2", "needs to be given without --sweep"),
        ("--sweep --num-microbatches 2", "needs to be given without --sweep"),
        ("--sweep --schedule zb_h1", "needs to be given without --sweep"),
        ("--sweep --packs there", "needs to be given without --sweep"),
        ("--sweep --recompute full", "needs to be given without --sweep"),
        ("--sweep --tower auto", "needs to be given without --sweep"),
        ("--pack-iterations 2", "--pack-iterations 2 needs --packs"),
        ("--radius 2 --method layers", "--radius 2 needs --method bmp or joint"),
        ("--model tiny", "--model tiny needs --analytic"),
        ("--budgets 9x4096", "needs --analytic"),
        ("--tensor-sizes 2", "--tensor-sizes 2 needs --analytic"),
        ("--expert-sizes 2", "--expert-sizes 2 needs --analytic"),
        ("--profile profile.json --analytic a100", "--analytic a100 needs to be given without --profile"),
    ],
}
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
    ("tool", "words", "message"), [(tool, *case) for tool, cases in NEEDS.items() for case in cases]
)
def test_what_would_not_be_obeyed_is_refused(
    tool: str, words: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [tool, *REQUIRED[tool], *words.split()])
    with pytest.raises(UserError) as refused:
        importlib.import_module(f"tools.{tool}").main()
    assert message in str(refused.value)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("tool", NEEDS)
def test_every_need_is_tried(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = parser_of(tool, monkeypatch)
    tried = {word for words, _ in NEEDS[tool] for word in words.split()}
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
