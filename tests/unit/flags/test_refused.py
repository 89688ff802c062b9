"""A command line that would not be obeyed is refused in one line that names the flag, before anything starts."""

import subprocess
import sys
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.core import utils as core_utils
from packaging.version import Version

from megatron.vlm import arguments, platform
from megatron.vlm.arguments import add_vlm_arguments, parse_arguments
from megatron.vlm.flags import check
from megatron.vlm.flags.lists import Standing
from megatron.vlm.flags.parser import Parser
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import UserError
from omnibal_ext.plan import single_stage_plan

ROOT = Path(__file__).parents[3]
COMPLETE = "--preset tiny --lr 1e-3 --train-iters 3"


def refusal(words: str) -> str:
    with pytest.raises(UserError) as refused:
        parse_arguments(words.split())
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--micro-batch-size 4", ("it is 1", "--vit-budget")),
        ("--micro-batch-size=4", ("it is 1",)),
        ("--rerun-mode report_stats", ("only disabled or validate_results",)),
        ("--context-parallel-size 2", ("it is 1", "tools/pack_data.py --widths")),
        ("--hybrid-context-parallel", ("tools/pack_data.py --widths",)),
        ("--rotary-base 500", ("it is 10000", "--preset")),
        ("--seq-length 17", ("--plan",)),
        ("--num-layers 7", ("--preset",)),
        ("--qk-layernorm", ("--preset",)),
        ("--disable-bias-linear --add-qkv-bias", ("--add-qkv-bias",)),
        ("--bf16 --fp32-residual-connection", ("--bf16",)),
        ("--eval-iters 3", ("--eval-packs",)),
        ("--ckpt-format torch", ("torch_dist",)),
        ("--decoupled-lr 1e-4", ("--lr-vit",)),
        ("--recompute-granularity full", ("the plan",)),
        ("--recompute-activations", ("the plan",)),
        ("--no-overlap-p2p-communication", ("the plan",)),
        ("--tp-comm-overlap", ("Transformer Engine",)),
        ("--no-tp-comm-bulk-wgrad", ("Transformer Engine",)),
        ("--use-megatron-fsdp", ("--use-distributed-optimizer",)),
        ("--use-torch-fsdp2", ("--use-distributed-optimizer",)),
        ("--num-experts 8", ("experts",)),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", ("only native",)),
        ("--no-align-param-gather", ("in one order",)),
        ("--init-method-xavier-uniform", ("normal distribution",)),
        ("--data-parallel-random-init", ("--seed",)),
        ("--train-samples 100", ("--train-iters",)),
        ("--rampup-batch-size 2 2 8", ("--micro-batches",)),
        ("--data-path x", ("--packs",)),
        ("--tokenizer-model x", ("tools/preprocess_data.py",)),
        ("--yaml-cfg x.yaml", ("command line",)),
        ("--optimizer muon", ("adam or sgd",)),
        ("--log-throughput", ("samples",)),
    ],
)
def test_what_would_not_be_obeyed_is_refused_with_the_reason(flags: str, words: tuple[str, ...]) -> None:
    message = refusal(f"{COMPLETE} {flags}")
    assert [word for word in flags.replace("=", " ").split() if word.startswith("--")][-1] in message
    assert "docs/flags.md" in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--exit-signal NOTHING", "--exit-signal: invalid exit-signal value: 'NOTHING'; see --help"),
        ("--logging-level x", "--logging-level: invalid int value: 'x'; see --help"),
        ("--save a\x1b[31mb", r"a\x1b[31mb: has characters that are not to be seen in a log; rename it"),
    ],
)
def test_a_word_that_no_flag_takes_is_one_line(flags: str, message: str) -> None:
    """Megatron's own reader of names fails with what argparse does not expect."""
    assert refusal(f"{COMPLETE} {flags}") == message


def test_all_that_is_refused_is_said_at_once() -> None:
    message = refusal(f"{COMPLETE} --fp4-format e2m1 --seed 3 --micro-batch-size 2 --freeze vit")
    assert "--fp4-format" in message
    assert "--micro-batch-size" in message
    assert "--seed" not in message


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (f"{COMPLETE} --weight-decai 0.1", ("--weight-decai", "--weight-decay")),
        (f"{COMPLETE} --xyzzy", ("--xyzzy", "--help")),
        (f"{COMPLETE} --seed", ("--seed", "expected one argument")),
        (f"{COMPLETE} --seed x", ("--seed", "invalid int value")),
        (f"{COMPLETE} --lr-decay-style steep", ("--lr-decay-style", "steep", "cosine")),
        (f"{COMPLETE} stray", ("stray",)),
        ("--lr 1e-3 --train-iters 3", ("--preset",)),
        ("--preset tiny --train-iters 3", ("--lr",)),
        ("--preset tiny --lr 1e-3", ("--train-iters", "--epochs")),
        (f"{COMPLETE} --save here", ("--save here", "--save-interval")),
        (f"{COMPLETE} --save here --save-interval 0", ("--save-interval", "at least 1")),
        (f"{COMPLETE} --min-lr 1", ("Megatron refuses", "min_lr <= lr")),
        (f"{COMPLETE} --tensor-model-parallel-size 3", ("Megatron refuses", "not divisible")),
        (f"{COMPLETE} --fp16 --bf16", ("Megatron refuses",)),
    ],
)
def test_what_argparse_and_megatron_refuse_is_one_line(command: str, words: tuple[str, ...]) -> None:
    message = refusal(command)
    assert len(message) < 300
    assert [word for word in words if word not in message] == []


def test_the_value_that_is_set_may_be_given_too() -> None:
    words = (
        f"{COMPLETE} --micro-batch-size 1 --disable-bias-linear --swiglu --context-parallel-size=1 --rotary-base 10000"
    )
    parser = Parser(add_vlm_arguments, [*words.split(), "--no-rope-fusion", "--exit-interval", "2"])
    given = parser.given()
    parser.set_defaults(micro_batch_size=1, add_bias_linear=False, swiglu=True, rotary_base=10000)
    assert check.check_given(given, parser) == ("--no-rope-fusion", "--exit-interval")


def test_given_flags_are_those_written_and_no_defaults() -> None:
    parser = Parser(add_vlm_arguments, ["--preset", "tiny", "--no-rope-fusion", "--lr=1e-3"])
    assert vars(parser.given()) == {
        "preset": "tiny",
        "apply_rope_fusion": False,
        "lr": 1e-3,
    }
    assert parser.parse_args().seed == 1234  # defaults are there again


def test_a_flag_in_no_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer Megatron may have flags that nobody has looked at."""
    parser = Parser(add_vlm_arguments, ["--preset", "tiny", "--seed", "3"])
    monkeypatch.setattr(check, "standings", lambda: {"lr": (Standing.OBEYED, None)})
    with pytest.raises(UserError, match="--seed 3: not known"):
        check.check_given(Namespace(seed=3), parser)


@pytest.mark.starts
def test_help_explains_what_may_be_given_and_nothing_else() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "megatron.vlm.pretrain", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
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
