"""What the launcher refuses of its own command line before it touches anything, and what it makes of conversations."""

import sys
from argparse import Action, Namespace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.vlm.arguments import add_vlm_arguments
from megatron.vlm.flags.lists import ALLOWED
from megatron.vlm.flags.parser import Parser
from omnibal_ext.errors import UserError
from omnibal_ext.flags import flag_value
from omnibal_ext.launch.conversations import check_conversation_flags
from omnibal_ext.launch.folder import is_made
from omnibal_ext.reading.stores import store_named
from tests.flag_page import megatron_actions
from tools import launch

CONVERSATIONS = ("--model", "tiny", "--run-dir", "run", "--input", "chat.jsonl")


def parsed(monkeypatch: pytest.MonkeyPatch, *words: object, run_dir: object = "run") -> Namespace:
    files = ("--data", "in/data", "--packs", "in/packs", "--eval-data", "in/held", "--eval-packs", "in/held-packs")
    words = ("launch", "--model", "tiny", *files, "--run-dir", run_dir, *words)
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    arguments: Namespace = launch._parsed()
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
    assert launch._megatron_flags(arguments).freeze == ["vit", "projector"]


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


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "null", b"\xff"])
def test_a_note_that_cannot_be_read_says_nothing(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "packs.inputs.json"
    assert not is_made(path, {})
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert not is_made(path, {})


@pytest.mark.parametrize("held_out", [(), ("--held-out", "0.02")])
def test_a_run_evaluates_on_what_it_holds_out(held_out: tuple[str, ...]) -> None:
    arguments = launch._parser().parse_args((*CONVERSATIONS, *held_out))
    check_conversation_flags(arguments)
    assert (arguments.data, arguments.packs) == ("run/data", "run/packs-by-size")
    evaluated = ("run/data", "run/packs-held-out") if held_out else (None, None)
    assert (arguments.eval_data, arguments.eval_packs) == evaluated


@pytest.mark.parametrize(
    ("given", "rate"), [((), "1e-5"), (("--lora-rank", "8"), "4e-5"), (("--lora-rank", "8", "--lr", "1e-4"), "1e-4")]
)
def test_adapters_are_trained_at_their_own_usual_rate(given: tuple[str, ...], rate: str) -> None:
    arguments = launch._parser().parse_args((*CONVERSATIONS, "--", *given))
    check_conversation_flags(arguments)
    assert [value for flag, value in pairwise(arguments.megatron) if flag == "--lr"] == [rate]


RUN = ["--model", "tiny", "--run-dir", "run", "--data", "data", "--packs", "packs"]
TRAINER = Parser(add_vlm_arguments, [])
LAUNCHER = launch._parser()
FORWARDED_FLAGS = [action for action in LAUNCHER._actions if set(action.option_strings) <= LAUNCHER.forwarded]


def value_of(action: Action) -> list[str]:
    if action.nargs == 0:
        return []
    usual = {float: "0.5", store_named: "s3://bucket"}.get(action.type, "3")  # type: ignore[call-overload]
    words = [str(choice) for choice in action.choices] if action.choices else [usual]
    return words if action.nargs == "+" else words[:1]


def handed_on(*words: str) -> Namespace:
    found: Namespace = LAUNCHER.parse_args([*RUN, *words])
    return found


def test_every_flag_of_our_trainer_is_a_flag_of_the_launcher() -> None:
    ours = {word for action in TRAINER._actions if action.dest in TRAINER.own for word in action.option_strings}
    known = {word for action in LAUNCHER._actions for word in action.option_strings}
    assert ours - known == set()


@pytest.mark.parametrize("action", FORWARDED_FLAGS, ids=lambda action: action.option_strings[0])
def test_a_flag_means_before_the_dashes_what_it_means_behind(action: Action) -> None:
    words = [action.option_strings[0], *value_of(action)]
    before, behind = handed_on(*words).megatron, handed_on("--", *words).megatron
    trainer = [Parser(add_vlm_arguments, ["--model", "tiny", *given]).given() for given in (before, behind)]
    assert trainer[0] == trainer[1]
    assert vars(trainer[0]).keys() == {"preset", action.dest}
    with pytest.raises(UserError, match="is given twice"):
        handed_on(*words, "--", *words)


def test_what_the_launcher_says_of_megatron_s_flags_is_so() -> None:
    """Types and numbers of words as Megatron's parser has them; none that a run may not give."""
    theirs = {action.dest: action for action in megatron_actions()}
    lifted = [action for action in FORWARDED_FLAGS if action.dest not in TRAINER.own]
    assert lifted
    for action in lifted:
        real = theirs[action.dest]
        assert set(action.option_strings) <= set(real.option_strings)
        assert (action.nargs, action.type or str) == (real.nargs, real.type or str)
        assert action.choices is None or [*action.choices] == [*(real.choices or ())]
        assert action.dest in ALLOWED
