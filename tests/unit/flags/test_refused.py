"""A command line that would not be obeyed is refused in a line for each flag, before anything starts."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

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

ROOT = Path(__file__).parents[3]
COMPLETE = "--preset tiny --lr 1e-3 --train-iters 3"
CASES = [  # the last flag is refused, with these words
    ("--micro-batch-size 4", "it is 1", "--vit-budget"), ("--micro-batch-size=4", "it is 1"),
    ("--rerun-mode report_stats", "only disabled or validate_results"),
    ("--context-parallel-size 2", "it is 1", "--widths"), ("--rotary-base 500", "it is 10000", "--model"),
    ("--seq-length 17", "--plan"), ("--disable-bias-linear --add-qkv-bias", "it stays off", "--model"),
    ("--eval-iters 3", "--eval-packs"), ("--ckpt-format torch", "torch_dist"),
    ("--optimizer muon", "only adam or sgd"),
    ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "only native"),
    ("--decoupled-lr 1e-4", "not obeyed; here it is --lr-vit"),
    ("--train-samples 100", "not obeyed; here it is --train-iters"),
    ("--rampup-batch-size 2 2 8", "--rampup-batch-size 2 2 8: not obeyed; here it is --micro-batches"),
    ("--recompute-granularity=full", "not obeyed; the plan sets what is recomputed"),
    ("--no-overlap-p2p-communication", "not obeyed; the plan (--plan) sets"),
    ("--use-megatron-fsdp", "--use-distributed-optimizer"), ("--data-path x", "--packs"),
    ("--exit-signal-handler-for-training", "the nearest is --exit-signal-handler"),
    ("--use-sharp", "not obeyed; leave it out"),
    ("--exit-signal NOTHING", "invalid exit-signal value: 'NOTHING'; see --help"),
    ("--logging-level x", "invalid int value: 'x'; see --help"), ("--seed", "expected one argument"),
    ("--lr-decay-style steep", "steep", "cosine"),
    ("--weight-decai 0.1", "no such flag; the nearest is --weight-decay"), ("--xyzzy", "no such flag; see --help"),
    ("--save here --save-interval 0", "at least 1"),
]  # fmt: skip
MULTIMODAL = """
    --model internvl3.5-8b --swiglu --use-distributed-optimizer --num-workers 8 --num-layers 36 --hidden-size 3584
    --norm-epsilon 1e-06 --normalization RMSNorm --group-query-attention --add-qkv-bias --seq-length 4096
    --decoder-seq-length 16384 --tokenizer-type MultimodalTokenizer --tokenizer-model Qwen/Qwen2.5-7B-Instruct
    --tokenizer-prompt-format qwen2p5 --disable-bias-linear --pipeline-model-parallel-size 4
    --tensor-model-parallel-size 1 --language-model-type=qwen2.5_7B --vision-model-type internvit --micro-batch-size 2
    --global-batch-size 256 --lr 2e-6 --min-lr 2.5e-7 --train-iters 20000 --lr-warmup-fraction .01
    --lr-decay-style cosine --clip-grad 10 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 1.95 --eod-mask-loss --bf16
    --img-h 448 --img-w 448 --patch-dim 14 --data-path sft_blend.yaml --dataloader-type external --split 100,0,0
    --prompt-path nvlm_prompts.json --log-params-norm --log-num-zeros-in-grad --freeze-LM --pixel-shuffle --use-tiling
    --max-num-tiles 12 --use-thumbnail --save S --save-interval 500 --pretrained-checkpoint first --use-te
    --disable-vision-class-token --ckpt-format torch --recompute-granularity full --recompute-method block
"""
"""Of Megatron-LM's examples/multimodal/nvlm/sft_qwen2p5_7b_internvit_6b_video.sh, with a model and a wrong number."""
MULTIMODAL_REFUSED = """
    --decoder-seq-length --tokenizer-model --tokenizer-prompt-format --language-model-type --vision-model-type
    --eod-mask-loss --img-h --img-w --patch-dim --data-path --split --prompt-path --freeze-LM --pixel-shuffle
    --use-tiling --max-num-tiles --use-thumbnail --pretrained-checkpoint --use-te --disable-vision-class-token
    --recompute-granularity --recompute-method 4 --hidden-size --add-qkv-bias --tokenizer-type
    --micro-batch-size --ckpt-format --adam-beta2
"""


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


@pytest.mark.starts
def test_a_script_of_megatron_s_examples_is_refused_in_one_go() -> None:
    done = run_alone("megatron.vlm.pretrain", *MULTIMODAL.split())
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert done.stdout == ""
    assert [line for line in lines if not line.startswith("error: ")] == []
    assert [line.split()[1].rstrip(":") for line in lines] == MULTIMODAL_REFUSED.split()


@pytest.mark.starts
def test_the_checks_before_a_start_find_a_fault_for_each_flag() -> None:
    words = f"{COMPLETE} --use-sharp --micro-batch-size 2 --seed 0".split()
    findings = json.loads(run_alone("megatron.vlm.preflight", "{}", *words).stdout)["findings"]
    assert {finding["state"] for finding in findings} == {"refused"}
    named = [finding["detail"].split()[0].rstrip(":") for finding in findings]
    assert named == ["--use-sharp", "--micro-batch-size", "--seed"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"{COMPLETE} stray", ("stray",)),
        (f"{COMPLETE} --save a\x1b[31mb", (r"a\x1b[31mb: has characters that are not to be seen in a log",)),
        ("--lr 1e-3", ("--model is missing", "--train-iters", "--epochs")),
        ("--preset tiny --train-iters 3", ("--lr is missing",)),
        (f"{COMPLETE} --min-lr 1", ("Megatron refuses", "min_lr <= lr")),
        (f"{COMPLETE} --tensor-model-parallel-size 3", ("Megatron refuses", "not divisible")),
        (f"{COMPLETE} --fp16 --bf16", ("Megatron refuses",)),
        (f"{COMPLETE} --fp4-format e2m1 --seed x", ("--fp4-format e2m1: not obeyed", "--seed: invalid int value")),
    ],
)
def test_what_argparse_and_megatron_refuse_is_a_line(command: str, words: tuple[str, ...]) -> None:
    message = "; ".join(refusals(command))
    assert len(message) < 300
    assert [word for word in words if word not in message] == []


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
