"""A command line that would not be obeyed is refused in a line for each flag, before anything starts."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from megatron.core import utils as core_utils
from packaging.version import Version

from megatron.vlm import arguments, platform
from megatron.vlm.arguments import add_vlm_arguments, parse_arguments
from megatron.vlm.flags.parser import Parser, untested
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import UserError
from omnibal_ext.plan import single_stage_plan
from tests.programs import run_alone

COMPLETE = "--preset tiny --lr 1e-3 --train-iters 3"
HERE = Path(__file__).parent
CASES = [json.loads(line) for line in (HERE / "refused.jsonl").read_text().splitlines()]
"""Flags, of which the last is refused, and words with which it is."""
COMMANDS = [json.loads(line) for line in (HERE / "commands.jsonl").read_text().splitlines()]
"""Whether Transformer Engine is there, a whole command line, and words of its refusal."""
SCRIPT, SCRIPT_REFUSED = (HERE / "nvlm_sft.txt").read_text().split("\n\n")
"""Of Megatron-LM's examples/multimodal/nvlm/sft_qwen2p5_7b_internvit_6b_video.sh, with a model and a wrong number."""


def refusals(words: str) -> list[str]:
    with pytest.raises(UserError) as refused:
        parse_arguments(words.split())
    return refused.value.lines


def test_what_would_not_be_obeyed_is_refused_with_what_to_do() -> None:
    wrong = []
    for flags, *words in CASES:
        lines = refusals(f"{COMPLETE} {flags}")
        flag = [word for word in flags.replace("=", " ").split() if word.startswith("--")][-1]
        line = next((line for line in lines if line.startswith(flag)), "")
        wrong += [f"{flags}: {lines}"] if [word for word in words if word not in line] or len(line) > 300 else []
    assert wrong == []


@pytest.mark.parametrize("flag", ["--pipeline-model-parallel-size 1", "--num-virtual-stages-per-pipeline-rank 2"])
def test_a_refused_model_brings_no_refusal_of_a_plan_that_nobody_gave(flag: str) -> None:
    assert refusals(f"{COMPLETE} --freeze vit projector llm {flag}") == [
        "--freeze vit projector llm leaves nothing to train; leave one part out"
    ]


@pytest.mark.starts
def test_a_script_of_megatron_s_examples_is_refused_in_one_go() -> None:
    done = run_alone("megatron.vlm.pretrain", *SCRIPT.split())
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert [line for line in lines if not line.startswith("error: ")] == []
    assert [line.split()[1].rstrip(":") for line in lines] == SCRIPT_REFUSED.split()


@pytest.mark.starts
def test_the_checks_before_a_start_find_a_fault_for_each_flag() -> None:
    words = f"{COMPLETE} --use-sharp --micro-batch-size 2 --seed 0".split()
    findings = json.loads(run_alone("megatron.vlm.preflight", "{}", *words).stdout)["findings"]
    assert {finding["state"] for finding in findings} == {"refused"}
    named = [finding["detail"].split()[0].rstrip(":") for finding in findings]
    assert named == ["--use-sharp", "--micro-batch-size", "--seed"]


@pytest.mark.parametrize("row", COMMANDS, ids=itemgetter(1))
def test_a_run_that_cannot_be_is_refused_in_lines(row: Sequence[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By argparse, by Megatron, by model, machine and ranks."""
    engine, command, *words = row
    monkeypatch.setattr(platform, "HAS_TRANSFORMER_ENGINE", engine)
    with pytest.raises(UserError) as refused:
        arguments.read_arguments(command.split())
    assert max(map(len, refused.value.lines)) < 300
    assert [word for word in words if word not in "; ".join(refused.value.lines)] == []


def test_the_value_that_is_set_may_be_given_too_and_what_is_untested_is_named() -> None:
    words = (
        f"{COMPLETE} --micro-batch-size 1 --disable-bias-linear --swiglu --context-parallel-size=1 --rotary-base 10000 "
        "--no-rope-fusion --exit-interval 2"
    )
    inputs = arguments.read_arguments(words.split())
    assert inputs.untested == ("--no-rope-fusion", "--exit-interval")


def test_given_flags_are_those_written_and_no_defaults() -> None:
    parser = Parser(add_vlm_arguments, ["--preset", "tiny", "--no-rope-fusion", "--lr=1e-3"])
    assert vars(parser.given()) == {"preset": "tiny", "apply_rope_fusion": False, "lr": 1e-3}
    assert untested(parser.given(), parser) == ("--no-rope-fusion",)
    assert parser.parse_args().seed == 1234  # defaults are there again


@pytest.mark.starts
def test_help_explains_what_may_be_given_and_nothing_else() -> None:
    done = run_alone("megatron.vlm.pretrain", "--help")
    assert done.returncode == 0
    assert "docs/flags.md" in done.stdout
    for flag in ("--preset", "--packs", "--lr-warmup-iters", "--exit-interval"):
        assert flag in done.stdout
    for flag in ("--num-experts", "--micro-batch-size", "--fp4-format"):
        assert flag not in done.stdout


@pytest.mark.parametrize(("engine", "version", "refused"), [(True, "2.7.0", True), (False, "0.0.0", False)])
def test_a_split_backward_needs_an_engine_that_reduces_late(
    monkeypatch: pytest.MonkeyPatch, engine: bool, version: str, refused: bool
) -> None:
    plan = replace(single_stage_plan(preset("tiny").chain), schedule="zb_h1")
    monkeypatch.setattr(arguments, "_load_plan", lambda *_: plan)
    monkeypatch.setattr(platform, "HAS_TRANSFORMER_ENGINE", engine)
    monkeypatch.setattr(core_utils, "_te_version", Version(version))
    with pytest.raises(UserError, match=r"zb_h1 .* 2\.7\.0 .* 2\.8\.0 is the first") if refused else nullcontext():
        arguments.read_arguments(f"{COMPLETE} --global-batch-size 1".split())
