"""A flag that would change nothing, or break the run, is refused unless what it needs is there too."""

import pytest

from megatron.vlm import platform
from megatron.vlm.arguments import add_vlm_arguments, read_arguments
from megatron.vlm.flags.lists import ALLOWED
from megatron.vlm.flags.needs import NEEDS
from megatron.vlm.flags.parser import Parser
from omnibal_ext.errors import UserError
from omnibal_ext.launch.candidates import trial_flags

COMPLETE = "--preset tiny --lr 1e-3 --train-iters 8"
SAVED = "--save here --save-interval 2"
PROFILED = "--profile --profile-step-start 2 --profile-step-end 4"
CASES: dict[str | None, tuple[str, ...]] = {
    None: (
        "--freeze vit --lr-vit 1e-5", "--freeze vit --weight-decay-vit 0.1", "--freeze projector --lr-projector 1e-5",
        "--freeze llm projector --lr-vit 1e-5", "--freeze llm --lr-vit 1e-5 --lr-projector 1e-5",
        "--lora-rank 4 --freeze vit", "--lr-warmup-fraction 0.5 --lr-warmup-iters 2",
        "--optimizer sgd --adam-beta1 0.8", "--optimizer sgd --adam-beta2 0.8", "--optimizer sgd --adam-eps 0.8",
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1 --weight-decay 0.3",
        "--fp16 --loss-scale 64 --hysteresis 5", "--fp8-recipe tensorwise", "--first-last-layers-bf16",
        "--num-layers-at-start-in-bf16 2", "--num-layers-at-end-in-bf16 2", "--moe-router-dtype fp64",
        "--eval-interval 2", "--start-eval-at-iter 2", "--skip-train",
        "--tensorboard-dir there --log-validation-ppl-to-tensorboard", "--async-save", f"{SAVED} --async-save",
        f"{SAVED} --async-strategy mcore", f"{SAVED} --use-persistent-ckpt-worker", f"{SAVED} --dist-ckpt-workers 2",
        f"{SAVED} --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", "--straggler-ctrlr-port 5000",
        "--straggler-minmax-count 2", "--disable-straggler-on-startup", "--wandb-project mine",
        "--wandb-exp-name mine", "--wandb-save-dir there", "--wandb-entity ours", "--profile-step-start 2",
        "--profile-step-end 4", "--profile-ranks 0", "--use-pytorch-profiler", "--record-shapes", "--nvtx-ranges",
        "--memory-snapshot-path there", "--overlap-grad-reduce --ddp-bucket-size 3 --ddp-num-buckets 2",
        "--flight-recorder-trace-buffer-size 20", "--no-flight-recorder-dump-on-timeout",
        "--flight-recorder-include-stack-trace", "--no-flight-recorder-include-only-active",
        "--no-flight-recorder-extra-dump-on-exec",
    ),
    "--lora-targets projector": ("--lora-rank 4 --weight-decay-projector 0.1",),
    "--lr-vit 1e-4": ("--lr-warmup-iters 2 --lr-warmup-init 1e-4 --lr-vit 1e-5",),
    "--lora-rank 4": ("--lora-alpha 8", "--lora-targets vit"),
    "--lr-decay-iters 9": ("--lr-warmup-iters 8",),
    "--lr-warmup-iters 2": ("--lr-warmup-init 1e-4",),
    "--lr 1e-2": ("--lr-warmup-iters 2 --lr-warmup-init 1e-2",),
    "--lr-wsd-decay-iters 3": ("--lr-decay-style WSD",),
    "--lr-decay-style WSD --lr-wsd-decay-iters 3": ("--lr-wsd-decay-style linear",),
    "--lr-decay-style WSD": ("--lr-wsd-decay-iters 3",),
    "--train-iters 9": ("--lr-decay-style WSD --lr-warmup-iters 6 --lr-wsd-decay-iters 3",),
    "--optimizer sgd": ("--sgd-momentum 0.5",),
    "--optimizer adam": ("--optimizer sgd --use-distributed-optimizer",),
    "--weight-decay-incr-style linear --end-weight-decay 1": ("--start-weight-decay 0",),
    "--weight-decay-incr-style linear --start-weight-decay 0": ("--end-weight-decay 1",),
    "--end-weight-decay 1": ("--start-weight-decay 1 --end-weight-decay 0 --weight-decay-incr-style cosine",),
    "--fp16": (
        "--loss-scale 64", "--initial-loss-scale 64", "--min-loss-scale 64", "--loss-scale-window 5",
        "--hysteresis 5",
    ),
    "--use-distributed-optimizer": ("--loss-scale 64", f"{SAVED} --dist-ckpt-optim-fully-reshardable"),
    "--loss-scale-window 2": ("--fp16 --loss-scale-window 2.5",),
    "--initial-loss-scale 64": ("--fp16 --min-loss-scale 64 --initial-loss-scale 32",),
    "--min-loss-scale 0.5": ("--fp16 --initial-loss-scale 0.5",),
    "--bf16": ("--grad-reduce-in-bf16",),
    "--save-interval 2": ("--save here",),
    "--save here": ("--save-interval 2", "--save-interval 2 --save-retain-interval 4"),
    "--save-retain-interval 4": (f"{SAVED} --save-retain-interval 3",),
    "--async-strategy mcore": (f"{SAVED} --async-save --use-persistent-ckpt-worker",),
    SAVED: (
        "--no-save-optim", "--no-save-rng", "--save-hf", "--no-ckpt-fully-parallel-save",
        "--ckpt-assume-constant-structure", "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler",
        "--dist-ckpt-strictness raise_all", "--ckpt-fully-parallel-load",
        "--no-ckpt-load-validate-sharding-integrity", "--verify-integrity",
    ),
    "--load here": (
        "--use-distributed-optimizer --from here --dist-ckpt-optim-fully-reshardable", "--ckpt-step 2",
        "--exit-on-missing-checkpoint", "--no-load-optim", "--no-load-rng",
    ),
    "--from here": ("--finetune",),
    "--tensorboard-dir there": (
        "--tensorboard-log-interval 2", "--tensorboard-queue-size 2", "--log-timers-to-tensorboard",
        "--no-log-loss-scale-to-tensorboard", "--log-world-size-to-tensorboard", f"{PROFILED} --use-pytorch-profiler",
    ),
    "--log-memory-interval 4": ("--log-interval 2 --log-memory-interval 3",),
    "--timing-log-level 1": ("--no-barrier-with-level-1-timing",),
    "--metrics-file metrics.jsonl": ("--timelines 3",),
    f"{PROFILED} --use-pytorch-profiler --tensorboard-dir there": (
        "--pytorch-profiler-collect-shapes", "--pytorch-profiler-collect-callstack",
    ),
    "--train-iters 12": ("--profile --use-pytorch-profiler --tensorboard-dir there",),
    "--profile-ranks 0": (f"{PROFILED} --use-pytorch-profiler --tensorboard-dir there --profile-ranks 1",),
    "--exit-signal-handler": ("--exit-signal SIGINT",),
    "--manual-gc": ("--manual-gc-interval 2", "--no-manual-gc-eval"),
    "--overlap-grad-reduce": ("--ddp-bucket-size 2", "--ddp-num-buckets 2"),
}  # fmt: skip
"""What is missing (None: nothing would help, or another machine), and what is refused without it."""
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
        if missing is not None:
            read_arguments(f"{COMPLETE} {flags} {missing}".split())


def test_what_a_run_may_be_given_its_trials_may_too() -> None:
    """A trial saves, evaluates and logs nothing, and so leaves out all that needs a save, an evaluation or a log."""
    for flags in (f"{flags} {missing}" for flags, missing in TRIED if missing):
        read_arguments(trial_flags(f"{COMPLETE} {flags}".split()))


def test_what_a_gpu_does_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "installed", lambda _: True)
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
    monkeypatch.setattr(platform, "installed", lambda _: True)
    assert read_arguments(words).args.wandb_project == "p"


def test_saves_in_the_background_need_a_package_or_megatron_s_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    words = f"{COMPLETE} {SAVED} --async-save --use-persistent-ckpt-worker".split()
    with pytest.raises(UserError, match="--async-strategy mcore, or the package nvidia-resiliency-ext"):
        read_arguments(words)
    assert read_arguments([*words, "--async-strategy", "mcore"]).args.async_save
    monkeypatch.setattr(platform, "installed", lambda name: name == "nvidia_resiliency_ext")
    assert read_arguments(words).args.async_save
