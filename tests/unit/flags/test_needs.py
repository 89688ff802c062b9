"""A flag that would change nothing, or break the run, is refused unless what it needs is there too."""

import json
import re
from pathlib import Path

import pytest

from megatron.vlm import optional
from megatron.vlm.arguments import add_vlm_arguments, read_arguments
from megatron.vlm.flags.lists import ALLOWED
from megatron.vlm.flags.needs import NEEDS
from megatron.vlm.flags.parser import Parser
from omnibal_ext.errors import UserError
from omnibal_ext.launch.candidates import trial_flags

COMPLETE = "--preset tiny --lr 1e-3 --train-iters 8"
SAVED = "--save here --save-interval 2"
PROFILED = "--profile --profile-step-start 2 --profile-step-end 4"
PLACES = {"SAVED": SAVED, "PROFILED": PROFILED}
CASES: dict[str, list[str]] = json.loads(
    re.sub("|".join(PLACES), lambda word: PLACES[word[0]], Path(__file__).with_name("needs.json").read_text())
)
"""What is missing (empty: nothing would help, or another machine), and what is refused without it."""
TRIED = [(flags, missing) for missing, many in CASES.items() for flags in many]
ON_A_GPU = [
    "--record-memory-history", "--tensorboard-dir there --log-memory-to-tensorboard", "--log-straggler", "--log-energy",
    "--log-device-memory-used", f"{PROFILED} --nvtx-ranges", PROFILED,
    "--use-distributed-optimizer --ddp-pad-buckets-for-high-nccl-busbw",
]  # fmt: skip


def refusal(words: str) -> list[str]:
    with pytest.raises(UserError) as refused:
        read_arguments(words.split())
    return refused.value.lines


def flags_in(words: str) -> list[str]:
    return [word for word in words.split() if word.startswith("--")]


def test_a_flag_needs_what_it_belongs_to() -> None:
    wrong = []
    for flags, _ in TRIED:
        lines = [line.partition(" needs ") for line in refusal(f"{COMPLETE} {flags}")]
        if not all(need and any(flag in begin for flag in flags_in(flags)) for begin, need, _ in lines):
            wrong.append(f"{flags}: {lines}")
    assert wrong == []


def test_with_that_it_is_taken() -> None:
    for flags, missing in TRIED:
        if missing:
            read_arguments(f"{COMPLETE} {flags} {missing}".split())


def test_what_a_run_may_be_given_its_trials_may_too() -> None:
    """A trial saves, evaluates and logs nothing, and so leaves out all that needs a save, an evaluation or a log."""
    for flags in (f"{flags} {missing}" for flags, missing in TRIED if missing):
        read_arguments(trial_flags(f"{COMPLETE} {flags}".split()))


def test_what_a_gpu_does_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "installed", lambda _: True)
    for flags in ON_A_GPU:
        assert [line for line in refusal(f"{COMPLETE} {flags}") if "a GPU" in line], flags


def test_every_row_is_tried() -> None:
    parser = Parser(add_vlm_arguments, [])
    options = {name: {word for action in parser._actions if action.dest == name for word in action.option_strings}
               for need in NEEDS for name in need.names.split()}  # fmt: skip
    tried = {word for flags in [flags for flags, _ in TRIED] + ON_A_GPU for word in flags_in(flags)}
    assert [name for name, words in options.items() if not words & tried] == []
    assert options.keys() - parser.own - ALLOWED.keys() == set()


def test_a_flag_given_as_it_is_anyway_needs_nothing() -> None:
    read_arguments(f"{COMPLETE} --lr-wsd-decay-style exponential --hysteresis 2 --sgd-momentum 0.9".split())
    read_arguments(f"{COMPLETE} --optimizer sgd --adam-beta1 0.9 --timelines 0".split())


def test_wandb_is_taken_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{COMPLETE} --wandb-project p --wandb-exp-name e --wandb-save-dir here".split()
    with pytest.raises(UserError, match="--wandb-project p needs the package wandb, and --wandb-save-dir or --save"):
        read_arguments(words)
    monkeypatch.setattr(optional, "installed", lambda _: True)
    assert read_arguments(words).args.wandb_project == "p"


def test_saves_in_the_background_need_a_package_or_megatron_s_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{COMPLETE} {SAVED} --async-save --use-persistent-ckpt-worker".split()
    with pytest.raises(UserError, match="--async-strategy mcore, or the package nvidia-resiliency-ext"):
        read_arguments(words)
    assert read_arguments([*words, "--async-strategy", "mcore"]).args.async_save
    monkeypatch.setattr(optional, "installed", lambda name: name == "nvidia_resiliency_ext")
    assert read_arguments(words).args.async_save
