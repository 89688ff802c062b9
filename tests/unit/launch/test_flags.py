"""What the launcher refuses of its own command line before it touches anything."""

import importlib
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.flags import flag_value


def parsed(monkeypatch: pytest.MonkeyPatch, *words: object, run_dir: object = "run") -> Namespace:
    files = ("--data", "in/data", "--packs", "in/packs", "--eval-data", "in/held", "--eval-packs", "in/held-packs")
    words = ("launch", "--model", "tiny", *files, "--run-dir", run_dir, *words)
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    arguments: Namespace = importlib.import_module("tools.launch")._parsed()
    return arguments


@pytest.mark.parametrize(
    "words",
    [
        ("--pipeline-model-parallel-size", 2), ("--pipeline-model-parallel-size=2",),
        ("--tensor-model-parallel-size", 2), ("--expert-model-parallel-size", 2), ("--data", "other"),
        ("--packs", "other"), ("--plan", "plan.json"), ("--model", "other"), ("--from-scratch",), ("--epochs", 3),
    ],
)  # fmt: skip
def test_a_flag_of_its_own_behind_the_dashes_is_answered(monkeypatch: pytest.MonkeyPatch, words: tuple[object]) -> None:
    """It would reach the ranks, and neither the plan nor the packs."""
    flag = str(words[0]).partition("=")[0]
    with pytest.raises(UserError, match=rf"{flag} stands behind --, .*; give it before") as refused:
        parsed(monkeypatch, "--", "--lr", 1, *words)
    assert "provisional" not in str(refused.value)
    assert [line.partition(" ")[0] for line in refused.value.lines] == [flag]
    before = parsed(monkeypatch, *words, "--no-save", "--", "--lr", 1)
    assert before.megatron == ["--lr", "1"]
    with pytest.raises(UserError) as both:
        parsed(monkeypatch, "--", *words, "--lr", 1, "--data=other")
    assert {line.partition(" ")[0] for line in both.value.lines} == {flag, "--data"}


@pytest.mark.parametrize(
    ("before", "behind", "saved"),
    [
        ((), (), ["--save", "run/checkpoints", "--save-interval", "200"]),
        ((), ("--save-interval", "7"), ["--save-interval", "7", "--save", "run/checkpoints"]),
        ((), ("--save-interval=7",), ["--save-interval=7", "--save", "run/checkpoints"]),
        ((), ("--save", "there", "--save-interval", "7"), ["--save", "there", "--save-interval", "7"]),
        ((), ("--save=there",), ["--save=there"]),
        (("--no-save",), (), []),
    ],
)
def test_a_run_saves_in_its_folder_unless_it_is_told(
    monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], behind: tuple[str, ...], saved: list[str]
) -> None:
    assert parsed(monkeypatch, *before, "--", *behind).megatron == saved


@pytest.mark.parametrize("side", ["before", "behind"])
def test_frozen_parts_are_named_on_either_side(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    words = ("--freeze", "vit", "projector")
    arguments = parsed(monkeypatch, "--no-save", *((*words, "--") if side == "before" else ("--", *words)))
    assert arguments.megatron == [*words]
    assert importlib.import_module("tools.launch")._megatron_flags(arguments).freeze == ["vit", "projector"]


@pytest.mark.parametrize("odd", ["a\x1b[31m", "a\nerror: forged", "a\rb", "a\x00b", "a\u2028b", "a\udcff", "\x9b31m"])
def test_names_that_steer_a_terminal_or_forge_a_log_are_refused(monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    """Megatron prints the folders that it saves to as they are."""
    for words in (("--", "--save", odd), ("--profile", odd), ("--", f"--save={odd}")):
        with pytest.raises(UserError, match="characters that are not to be seen") as refused:
            parsed(monkeypatch, *words)
        assert str(refused.value).isprintable()
    for fine in ("图像 é", "a\u00a0b", "a\u3000b", "e\u0301"):
        parsed(monkeypatch, "--", "--save", fine)


@pytest.mark.parametrize("taken", ["data", "packs", "held", "held-packs"])
def test_a_run_does_not_write_into_what_it_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in" / taken).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "in" / taken)
    for inside in (f"in/{taken}", f"in/{taken}/", f"in/{taken}/run/deep", f"in/x/../{taken}", "link/run"):
        with pytest.raises(UserError, match=rf"--run-dir .*: lies in --\S+ in/{taken}, which a run reads"):
            parsed(monkeypatch, run_dir=inside)
    for beside in ("in", f"in/{taken}-2", f"run/{taken}"):
        parsed(monkeypatch, run_dir=beside)


def test_the_last_value_of_a_flag_counts() -> None:
    words = ["--save", "a", "--save=b", "--saver", "c"]
    assert flag_value("--save", words) == "b"
    assert flag_value("--save", [*words, "--save", "d"]) == "d"
    assert flag_value("--load", words) is None
    assert flag_value("--save", ["--save", "--load", "b"]) == ""
