"""The flags that cases are drawn from, the values that each takes or does not, and what each needs beside it."""

from dataclasses import dataclass
from functools import cache

from omnibal_ext.flags import Interval

MANY = ("--freeze", "--lora-targets", "--profile-ranks", "--moe-aux-loss-coeff", "--input")
"""Flags that take several words."""
FEW = {
    "--train-iters": ("1", "2", "4"), "--exit-interval": ("1", "2", "3", "99"), "--log-interval": ("1", "2", "7"),
    "--save-interval": ("1", "2", "3", "999999999999"), "--save-retain-interval": ("2", "4"),
    "--num-workers": ("0", "1"), "--eval-interval": ("1", "2", "50"), "--start-eval-at-iter": ("0", "2", "9"),
    "--global-batch-size": ("2", "1", "4"), "--lr-decay-iters": ("1", "2", "10"),
    "--lr-warmup-iters": ("0", "1", "2"), "--lr-wsd-decay-iters": ("1", "2"),
    "--lr-warmup-fraction": ("0.5", "0.9"), "--lr-warmup-init": ("0", "1e-4"), "--lr": ("0", "5e-4", "3e-3"),
    "--min-lr": ("0", "1e-4"), "--seed": ("1", "7", "2147483647"), "--init-method-std": ("0.3",),
    "--embedding-init-method-std": ("0.3",), "--hidden-dropout": ("0.5", "0"), "--attention-dropout": ("0.5",),
    "--weight-decay": ("0.5", "0"), "--clip-grad": ("0.01", "0"), "--adam-beta1": ("0.5", "0"),
    "--adam-beta2": ("0.5", "0"), "--adam-eps": ("0.1",), "--loss-scale": ("64", "1"), "--hysteresis": ("1", "3"),
    "--start-weight-decay": ("0", "0.2"), "--end-weight-decay": ("0.5", "1"), "--timelines": ("0", "1", "3", "100"),
    "--make-vocab-size-divisible-by": ("1", "64", "1000"), "--max-bad-steps": ("0", "3"),
    "--max-bad-samples": ("0", "9"), "--profile-step-start": ("0", "1"),
    "--profile-step-end": ("2", "3"), "--profile-ranks": ("0",),
    "--tensor-model-parallel-size": ("1", "2"), "--expert-model-parallel-size": ("1", "2"), "--freeze": ("vit", "llm"),
    "--lora-rank": ("1", "4"), "--lora-alpha": ("0.5", "8"), "--lora-targets": ("vit", "llm"),
    "--lr-vit": ("0", "5e-4"), "--lr-projector": ("0", "3e-3"),
    "--weight-decay-vit": ("0.5", "0"), "--weight-decay-projector": ("0.5", "0"),
    "--distributed-timeout-minutes": ("1", "30", "525600"), "--logging-level": ("10", "40"), "--ckpt-step": ("2",),
    "--ddp-num-buckets": ("1", "3"), "--ddp-bucket-size": ("1", "5000"), "--dist-ckpt-workers": ("1",),
    "--exit-duration-in-mins": ("30",), "--manual-gc-interval": ("0", "1", "5"), "--initial-loss-scale": ("64", "4096"),
    "--min-loss-scale": ("0.5", "2"), "--loss-scale-window": ("1", "1000"), "--sgd-momentum": ("0", "0.5"),
    "--moe-aux-loss-coeff": ("0",), "--exit-signal": ("SIGTERM", "SIGUSR2"), "--straggler-minmax-count": ("1",),
    # Of files and names:
    "--model": ("tiny",), "--preset": ("tiny",), "--data": ("DATA",), "--packs": ("PACKS",), "--eval-data": ("DATA",),
    "--eval-packs": ("HELD_OUT",), "--save": ("HERE/saves", "HERE/more/saves"), "--load": ("HERE/saves",),
    "--metrics-file": ("HERE/other.jsonl",), "--tensorboard-dir": ("HERE/board",), "--run-dir": ("HERE/run",),
    # The launcher's own:
    "--nproc-per-node": ("1", "2"), "--nnodes": ("1",), "--epochs": ("0.5", "0.2"), "--measure-top-k": ("0", "1"),
    "--pipeline-model-parallel-size": ("1", "2"), "--virtual-pipeline-model-parallel-size": ("1", "2"),
    "--memory-gib": ("1",), "--micro-batches": ("4",), "--workers": ("1", "2"), "--max-rejects": ("3",),
    "--rdzv-id": ("mine",), "--rdzv-endpoint": ("localhost:29511",),
}  # fmt: skip
"""Values that are taken, where those of its interval or its choices would train for long or show nothing."""

_SAVES = {"--save": "HERE/saves", "--save-interval": "2"}
_EVALUATES = {"--eval-data": "DATA", "--eval-packs": "HELD_OUT"}
_BOARD = {"--tensorboard-dir": "HERE/board"}
_PROFILES = {"--profile": "", "--profile-step-start": "1", "--profile-step-end": "2", "--use-pytorch-profiler": ""}
_NEEDED: tuple[tuple[dict[str, str], str], ...] = (
    (
        _SAVES,
        """
        save save-interval save-retain-interval async-save async-strategy no-save-optim no-save-rng ckpt-step finetune
        no-ckpt-fully-parallel-save ckpt-assume-constant-structure no-load-optim no-load-rng verify-integrity
        dist-ckpt-strictness ckpt-fully-parallel-load override-opt_param-scheduler exit-on-missing-checkpoint
        use-checkpoint-opt_param-scheduler no-ckpt-load-validate-sharding-integrity
        """,
    ),
    ({"--lora-rank": "4"}, "lora-alpha lora-targets"),
    (_EVALUATES, "eval-interval start-eval-at-iter skip-train eval-data eval-packs"),
    (
        _PROFILES | _BOARD,
        """
        profile profile-step-start profile-step-end use-pytorch-profiler profile-ranks pytorch-profiler-collect-shapes
        pytorch-profiler-collect-callstack
        """,
    ),
    (
        _BOARD,
        """
        tensorboard-log-interval tensorboard-queue-size log-timers-to-tensorboard no-log-loss-scale-to-tensorboard
        log-world-size-to-tensorboard
        """,
    ),
    ({"--fp16": ""}, "initial-loss-scale loss-scale-window hysteresis loss-scale min-loss-scale"),
    (_SAVES | {"--use-distributed-optimizer": ""}, "dist-ckpt-optim-fully-reshardable"),
    ({"--use-distributed-optimizer": "", "--overlap-grad-reduce": ""}, "overlap-param-gather"),
    ({"--overlap-grad-reduce": ""}, "ddp-bucket-size ddp-num-buckets"),
    ({"--optimizer": "sgd"}, "sgd-momentum"),
    ({"--bf16": ""}, "grad-reduce-in-bf16"),
    ({"--lr-warmup-iters": "2"}, "lr-warmup-init"),
    ({"--lr-wsd-decay-iters": "1", "--lr-decay-style": "WSD"}, "lr-decay-style lr-wsd-decay-iters lr-wsd-decay-style"),
    (
        {"--weight-decay-incr-style": "linear", "--start-weight-decay": "0.1", "--end-weight-decay": "0.3"},
        "weight-decay-incr-style start-weight-decay end-weight-decay",
    ),
    ({"--manual-gc": ""}, "manual-gc-interval no-manual-gc-eval"),
    ({"--exit-signal-handler": ""}, "exit-signal"),
    ({"--timing-log-level": "1"}, "no-barrier-with-level-1-timing timing-log-option"),
    ({"--nproc-per-node": "2"}, "pipeline-model-parallel-size tensor-model-parallel-size"),
    ({"--nproc-per-node": "2", "--pipeline-model-parallel-size": "2"}, "virtual-pipeline-model-parallel-size"),
)
COMPANY = {f"--{name}": needed for needed, names in _NEEDED for name in names.split()}
"""What a flag needs, mostly; the pair's own values count before these."""
WORDS = ("", "x", "-1", "0", "nan", "inf", "1e30", "2.5", "--", "7 7", "a\x1b[31mb", "a\nerror: b", "/nowhere/at/all")
"""What no flag, or hardly any, takes."""


@dataclass(frozen=True)
class Flag:
    name: str
    first: str
    """The first of its names."""
    allowed: bool
    launcher: bool = False
    """Only the launcher's."""
    both: bool = False
    """The launcher's and the trainer's, and none that may stand on either side of --."""
    switch: bool = False
    inside: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()


@cache
def all_flags() -> dict[str, Flag]:
    """Every flag of Megatron's parser, of ours and of the launcher, by each of its names."""
    from megatron.vlm.arguments import add_vlm_arguments
    from megatron.vlm.flags.lists import ALLOWED
    from megatron.vlm.flags.needs import NUMBERS
    from megatron.vlm.flags.parser import Parser
    from omnibal_ext.launch import flags as launch
    from tools.launch import _parser

    parser, launcher = Parser(add_vlm_arguments, []), _parser()
    ours = {name: action for action in launcher._actions for name in action.option_strings}
    trainer = {name: action for action in parser._actions for name in action.option_strings}
    intervals = {name: n for table in (launch.NUMBERS, NUMBERS) for n in table for name in n.names.split()}
    found = {}
    for name, action in {**ours, **trainer}.items():
        allowed = name in ours or action.dest in parser.own or action.dest in ALLOWED
        interval, whole = intervals.get(action.dest), action.type is int
        inside = FEW.get(name) or tuple(getattr(choice, "name", str(choice)) for choice in action.choices or ())
        if interval and not inside:
            inside = within(interval, whole)
        found[name] = Flag(
            name, action.option_strings[0], allowed, launcher=name not in trainer,
            both=name in ours and name in trainer and name not in launcher.forwarded,
            switch=action.nargs == 0,
            inside=inside,
            outside=beyond(interval) if interval else ("nothing-of-this-name",),
        )  # fmt: skip
    return found


def within(numbers: Interval, whole: bool) -> tuple[str, ...]:
    """A few numbers of an interval, its ends among them."""
    _, low, high, _ = numbers.ends
    tried = [float(low), float(low) + (1 if whole else 1e-6), min(float(high), 5.0), min(float(high), 1e9)]
    return tuple(str(int(value) if whole else value) for value in tried if numbers.holds(value))


def beyond(numbers: Interval) -> tuple[str, ...]:
    """Numbers that are not in it."""
    _, low, high, _ = numbers.ends
    tried = [float(low), float(low) - 1, -1e9, float(high), float(high) * 2, float("nan"), float("inf")]
    return tuple(f"{value:g}" for value in tried if not numbers.holds(value))
