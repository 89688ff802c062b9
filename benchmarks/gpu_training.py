"""Iterations of the trainer on packs of random content: parts of `benchmarks/gpu.py`, one after the other in a process.

All of a run is there but data: Megatron's loop, wrappers and distributed optimizer, our schedule, meters, recorder.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.training import checkpointing, training

from benchmarks.gpu_packs import LEARNT, Packs, RandomPacks
from megatron.vlm import platform
from megatron.vlm.arguments import parse_arguments
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pretrain import Trainer, train
from megatron.vlm.single import set_single_rank
from omnibal_ext.chain import TIMED_PART_OF, chain_kind
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.run_metrics import TIMELINE, complete_lines, training_intervals

WARM_UP = 2
"""Iterations that do not count, as functions are compiled in them."""
AS_TRAINED = ("--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


class RandomTrainer(Trainer):
    """The trainer on made-up packs."""

    def __init__(self, inputs: Any, packs: RandomPacks, folder: Path) -> None:
        """In `folder` lies a manifest, which saves name: what they are made of is the packs."""
        super().__init__(inputs)
        (folder / "manifest.json").write_text(json.dumps({"packs": str(packs)}))
        self.args.data = self.args.packs = str(folder)
        self.random_packs = packs
        self.stage: Any = None

    @staticmethod
    def sources(data: str | None) -> tuple[str, ...]:
        """One for all."""
        return ("random",)

    def model(self, *arguments: Any, **named: Any) -> Any:
        """The stage, which is kept to be looked at."""
        self.stage = super().model(*arguments, **named)
        return self.stage

    def datasets(self, *_: Any, **__: Any) -> tuple[Iterator[Microbatch], None, None]:
        """The packs from where a checkpoint left off, without end."""
        self.meter.start(self.args.train_iters, 0, 1.0)
        first, each = self.args.consumed_train_samples, self.args.global_batch_size
        return self.packs[True].add(self.random_packs, lambda: count(first), each), None, None


@dataclass(frozen=True)
class Run:
    """What a run left."""

    intervals: list[dict[str, Any]]
    lanes: list[dict[str, Any]]
    """Of rank 0 in the iterations that were recorded."""
    peak_bytes: int
    seconds_to_first: float
    """From the call to the end of the first iteration."""
    weights: float
    """A sum that tells weights apart, to the bit."""

    @property
    def settled(self) -> list[dict[str, Any]]:
        """The iterations that count."""
        return self.intervals[WARM_UP:] or self.intervals

    def mean(self, figure: str) -> float:
        """Of the iterations that count."""
        return float(np.mean([interval[figure] for interval in self.settled]))

    @property
    def tokens_per_second(self) -> float:
        """Useful ones."""
        return self.mean("useful_tokens_per_second")

    @property
    def seconds(self) -> float:
        """Of an iteration."""
        return self.mean("seconds")


def run_trainer(
    model: str, packs: Packs, an_iteration: int, iterations: int, folder: Path, *flags: str,
    make: Callable[[Any, RandomPacks, Path], RandomTrainer] = RandomTrainer,
) -> Run:  # fmt: skip
    """Train so many iterations of `an_iteration` packs, by what `make` gives; `folder` gets metrics and timelines."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics, began = folder / "metrics.jsonl", time.perf_counter()
    words = ["--model", model, "--lr", "1e-4", "--train-iters", str(iterations), "--log-interval", "1", *AS_TRAINED]
    words += ["--global-batch-size", str(an_iteration), "--metrics-file", str(metrics), "--timelines", "3", *flags]
    set_single_rank()
    with _megatron_as_it_was(), _asked(words):
        inputs = parse_arguments(words)
        platform.take_device()
        _forget_peak()
        trainer = make(inputs, RandomPacks(model, tuple(map(tuple, packs))), folder)
        train(trainer)
        weights = float(sum(weight.detach().double().abs().sum() for weight in trainer.stage.parameters()))
    intervals, lanes = training_intervals(metrics), complete_lines(folder / TIMELINE)[0]
    rest = sum(interval["seconds"] for interval in intervals[1:])
    return Run(intervals, [line["lanes"][0] for line in lanes], platform.peak_bytes() or 0,
               time.perf_counter() - began - rest, weights)  # fmt: skip


@contextmanager
def _asked(words: list[str]) -> Iterator[None]:
    """Megatron reads the command line by itself."""
    before, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _megatron_as_it_was() -> Iterator[None]:
    """Behind the block Megatron can be started anew: what the trainer has put before its functions is taken away."""
    places = {module: dict(vars(module)) for module in (training, checkpointing, dist_checkpointing)}
    try:
        yield
    finally:
        for module, names in places.items():
            vars(module).update(names)
        leave_megatron()


def leave_megatron() -> None:
    """Let Megatron be started anew, and give back what a run has held."""
    training.destroy_global_state()
    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.unfreeze()
    give_back()


def give_back() -> None:
    """Memory that nobody holds any more."""
    gc.collect()
    torch.cuda.empty_cache()


def _forget_peak() -> None:
    if platform.HAS_CUDA:
        torch.cuda.reset_peak_memory_stats()


def by_part(run: Run, profile: Profile) -> dict[str, dict[str, float]]:
    """Milliseconds a pack, by part and phase: what the profile says of the recorded packs, the host's where it takes
    longer, and what was measured.

    The word embedding is one of the language layers forward; backward the projector is done with before it is.
    """
    planned: dict[str, float] = {}
    trained: dict[str, float] = {}
    profile, packs = profile.with_supervised(LEARNT), 0
    for lane in run.lanes:
        sizes = PackSizes(*(np.array(column, np.int64) for column in list(zip(*lane["packs"], strict=True))[:3]))
        packs += len(lane["packs"])
        for kind in profile.cost_kinds:
            for phase, seconds in (("forward", profile.forward_seconds), ("backward", profile.backward_seconds)):
                name, device = f"{_part(kind, phase)} {phase}", seconds(kind, sizes)
                host = getattr(profile.layers[kind], f"host_{phase}_seconds")
                taken = np.maximum(device, host)[device > 0]
                planned[name] = planned.get(name, 0.0) + float(taken.sum())
        for *_, pieces in lane["actions"]:
            for part, phase, seconds in pieces:
                name = f"{part} {phase}"
                trained[name] = trained.get(name, 0.0) + seconds
    return {name: {"profile": planned.get(name, 0.0) / packs * 1e3, "trained": trained[name] / packs * 1e3}
            for name in sorted(trained)}  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """What a profile says of an iteration on one rank, as plans do."""

    seconds: float
    bytes: float
    """Of tensors: weights with their state, and what the largest pack keeps."""


def planned_step(profile: Profile, packs: Packs) -> Planned:
    """Of an iteration of these packs, one after the other."""
    tiles, tokens, squares = (
        np.array([[[sum(figure(*sample) for sample in pack) for pack in packs]]], np.int64)
        for figure in (lambda tiles, _: tiles, lambda _, tokens: tokens, lambda _, tokens: tokens**2)
    )
    sizes = PackSizes(tiles, tokens, squares)
    problem = LayoutProblem(profile.with_supervised(LEARNT), 1, len(packs), packs=sizes)
    whole = Layout((0, len(profile.chain)), ((),))
    held = problem.simulate(whole).peak_bytes[0] - profile.overhead_bytes
    return Planned(problem.step_seconds(whole), float(held))


def _part(kind: str, phase: str) -> str:
    return TIMED_PART_OF["projector" if (kind, phase) == ("word_embed", "backward") else chain_kind(kind)]


def resume(model: str, packs: Packs, folder: Path) -> dict[str, float]:
    """A run of six iterations, and one that goes on from its save at the third: largest differences, 0 where equal."""
    save = str(folder / "save")
    whole = run_trainer(model, packs, 2, 6, folder / "whole", "--save", save, "--save-interval", "3")
    _keep_only(Path(save), 3)
    again = run_trainer(model, packs, 2, 6, folder / "again", "--load", save)
    assert [interval["iteration"] for interval in again.intervals] == [4, 5, 6]
    losses = [abs(a["loss"] - b["loss"]) for a, b in zip(whole.intervals[3:], again.intervals[-3:], strict=True)]
    return {"loss": max(losses), "weights": abs(whole.weights - again.weights)}


def _keep_only(save: Path, iteration: int) -> None:
    (save / "latest_checkpointed_iteration.txt").write_text(str(iteration))
