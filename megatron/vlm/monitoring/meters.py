"""Metrics that Megatron does not log: samples/s, useful tokens/s, model FLOP/s, padding, DistRatio, loss by source."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.monitoring.journal import Journal
from omnibal_ext.costs.operations import ModelOperations
from omnibal_ext.modalities.modality import ALWAYS, ENCODED, FURTHER, LANGUAGE

OF_TOKENS = ("tokens", "useful_tokens", "samples", "squares", "useful_squares", "counted")
SIZES = (*OF_TOKENS, *(one.size for one in ENCODED))


@dataclass(frozen=True)
class Throughput:
    """Model FLOP/s of each device: the FLOPs that the samples need, without padding and recomputation."""

    operations: ModelOperations
    devices: int
    peak: float | None = None
    """FLOP/s of one device; None if unknown, then no MFU is reported."""

    def of(self, sizes: Tensor, seconds: float) -> dict[str, float]:
        """Return `model_tflops` of a device over `seconds`, and `mfu` if its peak is known; sizes as from `gather`."""
        totals = dict(zip(SIZES, sizes.sum(dim=(0, 1)).tolist(), strict=True))
        useful = totals | {LANGUAGE.size: totals["useful_tokens"]}
        rate = self.operations.total(useful, totals["useful_squares"], totals["counted"]) / seconds / self.devices
        return {"model_tflops": rate / 1e12} | ({"mfu": rate / self.peak} if self.peak else {})


class Tally:
    """Sums over one rank's microbatches: sizes on the host, losses on the device; `add` waits for nothing."""

    def __init__(self, sources: int) -> None:
        self.sizes = [0] * len(SIZES)
        self.losses = torch.zeros(sources, 2, dtype=torch.float64, device="cuda")
        """[sources, 2] weighted sum of the losses and sum of the weights of each source's tokens."""

    def copy(self) -> "Tally":
        """Return a copy of the sums, with which they are restored if the iteration is rerun."""
        other = Tally(len(self.losses))
        other.sizes, other.losses = list(self.sizes), self.losses.clone()
        return other

    def add(self, batch: Microbatch, losses: Tensor, weights: Tensor) -> None:
        """Add a microbatch's sizes, and by source its tokens' losses and weights [T]."""
        assert batch.sources is not None
        assert batch.segment_ids is not None
        found = (*(getattr(batch, name) for name in OF_TOKENS), *(batch.media_of(one.size).amount for one in ENCODED))
        self.sizes = [*map(add, self.sizes, found)]
        pairs = torch.stack([losses.detach() * weights, weights], dim=1)
        self.losses.index_add_(0, batch.sources[batch.segment_ids], pairs.double())


class TrainingMeter:
    """A meter that reports training after every `interval` iterations.

    It runs on the last pipeline stage, which sees every pack and its losses. The host waits for the device, and ranks
    for each other, only at a report. Of an iteration that is rerun (Megatron's rerun machine) only the last run counts.
    """

    def __init__(self, sources: Sequence[str], interval: int, journal: Journal, pace: Throughput | None = None) -> None:
        self.sources, self.interval, self.journal, self.throughput = tuple(sources), interval, journal, pace
        self.closed: list[Tally] = []
        self.tally = Tally(len(self.sources))
        self.start(None, 0, 1.0)

    def start(self, iterations: int | None, consumed_samples: int, samples_per_epoch: float) -> None:
        """Set the position and start the clock: training begins, or resumes. `iterations`: of the entire run."""
        self.iterations = iterations
        self.consumed_samples, self.samples_per_epoch = consumed_samples, samples_per_epoch
        self.started = time.perf_counter()

    def exclude(self, seconds: float) -> None:
        """Subtract seconds that were not spent on training, such as an evaluation's, from the interval."""
        self.started += seconds

    def begin_iteration(self) -> None:
        """Drop what was counted since the last complete iteration: if there is anything, its iteration is rerun."""
        self.tally = Tally(len(self.sources))

    def ends_interval(self, iteration: int) -> bool:
        """Return whether an interval, or training, ends with an iteration."""
        return iteration % self.interval == 0 or iteration == self.iterations

    def end_iteration(self, iteration: int, **more: Any) -> None:
        """Close an iteration, counted from 1; at the end of an interval write its report, with the fields `more`."""
        self.closed.append(self.tally)
        self.tally = Tally(len(self.sources))
        if self.ends_interval(iteration):
            self._report(iteration, more)
            self.closed, self.started = [], time.perf_counter()

    def _report(self, iteration: int, more: dict[str, Any]) -> None:
        sizes, losses = gather(self.closed)
        seconds = time.perf_counter() - self.started
        report = interval_report(sizes, losses, seconds, self.sources)
        report |= self.throughput.of(sizes, seconds) if self.throughput else {}
        self.consumed_samples += report["samples"]
        position = {
            "iterations": self.iterations,
            "consumed_samples": self.consumed_samples,
            "epoch": self.consumed_samples / self.samples_per_epoch,
        }
        self.journal.training(iteration, {**position, **report, **more})


class EvaluationMeter:
    """A meter that reports an evaluation: the exact mean loss over all counted tokens of the held-out packs."""

    def __init__(self, sources: Sequence[str], iterations: int, journal: Journal) -> None:
        self.sources, self.iterations, self.journal = tuple(sources), iterations, journal
        self.done = 0
        self.started = 0.0
        self.tally = Tally(len(self.sources))

    def begin_iteration(self) -> None:
        """Start the clock if the iteration is the first of a pass over the held-out packs."""
        if self.done == 0:
            self.started = time.perf_counter()

    def end_iteration(self) -> bool:
        """Count an iteration; return whether the pass is complete, so that the next iteration begins a new one."""
        self.done = (self.done + 1) % self.iterations
        return self.done == 0

    def end_pass(self, iteration: int) -> float:
        """Write the report of an evaluation after a training iteration; return its seconds. Collective."""
        sizes, losses = gather([self.tally])
        seconds = time.perf_counter() - self.started
        samples = int(sizes[..., SIZES.index("samples")].sum())
        self.journal.evaluation(
            iteration, {**mean_losses(losses, self.sources), "samples": samples, "seconds": seconds}
        )
        self.tally = Tally(len(self.sources))
        return seconds


def gather(tallies: Sequence[Tally]) -> tuple[Tensor, Tensor]:
    """Gather sizes [ranks, tallies, sizes] of all data-parallel ranks, and losses [sources, 2] in sum; collective."""
    sizes = torch.tensor([tally.sizes for tally in tallies], dtype=torch.float64)
    losses = torch.stack([tally.losses for tally in tallies]).sum(0)
    mine = torch.cat([sizes.to(losses.device).flatten(), losses.flatten()])
    everything = all_gathered(mine, parallel_state.get_data_parallel_group()).cpu()
    return everything[:, : sizes.numel()].view(-1, *sizes.shape), everything[:, sizes.numel() :].sum(0).view(-1, 2)


def all_gathered(mine: Tensor, group: ProcessGroup) -> Tensor:
    """Gather tensors of one shape from all ranks of a group; return [ranks, ...]. Collective over the group."""
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(parts, mine.contiguous(), group=group)
    return torch.stack(parts)


def interval_report(sizes: Tensor, losses: Tensor, seconds: float, sources: Sequence[str]) -> dict[str, Any]:
    """Return losses, rates, padding and DistRatios (OmniBal, section 3) of an interval of `seconds`.

    sizes [ranks, iterations, sizes], in the order of `SIZES` (tokens, ...); losses [sources, 2] summed over all ranks.
    """
    of = dict(zip(SIZES, sizes.unbind(-1), strict=True))
    samples, useful = (of[name].sum().item() for name in ("samples", "useful_tokens"))
    return {
        "seconds": seconds,
        **mean_losses(losses, sources),
        "samples": int(samples),
        "samples_per_second": samples / seconds,
        "useful_tokens_per_second": useful / seconds,
        "padding": 1 - useful / max(1.0, of["tokens"].sum().item()),
        **{one.dist_ratio: _dist_ratio(of[one.size]) for one in ALWAYS},
        "dist_ratio_attention": _dist_ratio(of["squares"]),
        **{one.dist_ratio: _dist_ratio(of[one.size]) for one in FURTHER if of[one.size].any()},
    }


def mean_losses(losses: Tensor, sources: Sequence[str]) -> dict[str, Any]:
    """Return the mean loss over all counted tokens, and of each source that has any; losses [sources, 2].

    `loss` is None if no token counts, as when every step was skipped.
    """
    totals, weights = losses.unbind(-1)
    counted = [source for source, weight in enumerate(weights.tolist()) if weight]
    return {
        "loss": totals.sum().item() / weights.sum().item() if counted else None,
        "source_losses": {sources[i]: totals[i].item() / weights[i].item() for i in counted},
    }


def _dist_ratio(work: Tensor) -> float:
    """Return the mean over iterations of sum_i (T_max - T_i) / (T_max N); work [ranks, iterations]."""
    most = work.max(dim=0).values
    waiting = ((most - work) / most.clamp(min=1)).mean(dim=0)
    return waiting.mean().item()
