"""Commands that people mistype are answered in one line that names the right word, before anything is loaded."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.vlm.arguments import add_vlm_arguments
from megatron.vlm.flags.parser import Parser
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import UserError
from tests.programs import run_tool
from tools import __main__ as omnibal
from tools import launch

MISTYPED = [json.loads(line) for line in Path(__file__).with_name("mistyped.jsonl").read_text().splitlines()]
"""To launch.py, to the trainer, or as a model, words, and what is answered."""


def refusal(parse: Callable[[], object]) -> str:
    with pytest.raises(UserError) as refused:
        parse()
    (line,) = str(refused.value).splitlines()
    return line


@pytest.mark.parametrize(("who", "words", "answer"), MISTYPED)
def test_what_is_mistyped_is_told_the_right_word(
    who: str, words: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch.py", *words.split()])
    if who == "trainer":
        (said,) = Parser(add_vlm_arguments, words.split()).refused
    else:
        said = refusal(launch._parsed if who == "launch" else lambda: preset(words))
    assert re.search(answer, said), said
    assert len(said) < 300


@pytest.mark.starts
def test_each_wrong_flag_has_a_line() -> None:
    done = run_tool("pack_data.py", "--dta", "D", "--llm_budget", 9)
    assert done.returncode == 2
    assert [line.partition(";")[0] for line in done.stderr.splitlines()] == [
        "error: --dta: no such flag", "error: --llm_budget: no such flag",
    ]  # fmt: skip


def test_what_is_behind_two_dashes_is_megatron_s() -> None:
    parsed = launch._parser().parse_args(["--model", "T", "--run-dir", "R", "--", "--lr", "1", "--modle"])
    assert (parsed.model, parsed.megatron) == ("T", ["--lr", "1", "--modle"])
    assert launch._parser().parse_args(["--model", "T", "--run-dir", "R"]).megatron == []


@pytest.mark.parametrize(("word", "nearest"), [("lauch", "launch"), ("packs", "pack"), ("preproces", "preprocess")])
def test_a_mistyped_command_is_told_the_nearest(
    word: str, nearest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["omnibal", word])
    with pytest.raises(SystemExit, match="2"):
        omnibal.main()
    assert f"omnibal {word}: no such command; the nearest is {nearest}," in capsys.readouterr().err


def test_help_has_a_sentence_for_each_command_and_there_is_a_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for word in ("--help", "--version"):
        monkeypatch.setattr(sys, "argv", ["omnibal", word])
        omnibal.main()
    said = capsys.readouterr().out
    assert all(f"  {name:12}{command.does}" in said for name, command in omnibal.COMMANDS.items())
    assert said.splitlines()[-1].startswith("omnibal 0.")
    folder = Path(omnibal.__file__).parent
    assert all((folder / command.file).exists() for command in omnibal.COMMANDS.values())
