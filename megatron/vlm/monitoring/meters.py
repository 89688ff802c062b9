"""What Megatron does not log: samples, useful tokens and model FLOPs a second, padding, levelness, loss by source."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.monitoring.journal import Journal
from omnibal_ext.costs.operations import ModelOperations

SIZES = ("tiles", "tokens", "useful_tokens", "samples", "squares", "useful_squares", "counted")


@dataclass(frozen=True)
class Pace:
    """How much of the machine the model's own work takes: operations of the samples over all devices' seconds."""

    operations: ModelOperations
    devices: int
    peak: float | None = None
    """Operations a second of one device; None: not known, so there is no share of it."""

    def of(self, sizes: Tensor, seconds: float) -> dict[str, float]:
        """TFLOP/s a device, and MFU where the device's peak is known; sizes as `gather` gives them."""
        whole = dict(zip(SIZES, sizes.sum(dim=(0, 1)).tolist(), strict=True))
        names = ("tiles", "useful_tokens", "useful_squares", "counted")
        rate = self.operations.total(*(whole[name] for name in names)) / seconds / self.devices
        return {"model_tflops": rate / 1e12} | ({"mfu": rate / self.peak} if self.peak else {})


class Tally:
    """What the microbatches of one rank held: sizes on the host, losses on the device. Adding waits for nothing."""

    def __init__(self, sources: int) -> None:
        self.sizes = [0] * len(SIZES)
        self.losses = torch.zeros(sources, 2, dtype=torch.float64, device="cuda")
        """[sources, 2] weighted sum of the losses and sum of the weights of each source's tokens."""

    def copy(self) -> "Tally":
        """The same figures, to go back to."""
        other = Tally(len(self.losses))
        other.sizes, other.losses = list(self.sizes), self.losses.clone()
        return other

    def add(self, batch: Microbatch, losses: Tensor, weights: Tensor) -> None:
        """Add a microbatch that was run; losses and weights [T]."""
        assert batch.sources is not None
        assert batch.segment_ids is not None
        self.sizes = [total + getattr(batch, name) for total, name in zip(self.sizes, SIZES, strict=True)]
        pairs = torch.stack([losses.detach() * weights, weights], dim=1)
        self.losses.index_add_(0, batch.sources[batch.segment_ids], pairs.double())


class TrainingMeter:
    """Reports every `interval` iterations what the training iterations since the last report were.

    The last pipeline stage meters (it sees every pack and its losses). The host waits for the device, and ranks for
    each other, only at a report. An iteration that is run again (Megatron's rerun machine) counts once, as it ran last.
    """

    def __init__(self, sources: Sequence[str], interval: int, journal: Journal, pace: Pace | None = None) -> None:
        self.sources, self.interval, self.journal, self.pace = tuple(sources), interval, journal, pace
        self.closed: list[Tally] = []
        self.tally = Tally(len(self.sources))
        self.start(None, 0, 1.0)

    def start(self, iterations: int | None, consumed_samples: int, samples_per_epoch: float) -> None:
        """Training of so many iterations begins, or goes on after so many samples."""
        self.iterations = iterations
        self.consumed_samples, self.samples_per_epoch = consumed_samples, samples_per_epoch
        self.started = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Seconds that were spent on something else than training."""
        self.started += seconds

    def begin_iteration(self) -> None:
        """Count from nothing: an iteration that was begun and not ended is run again."""
        self.tally = Tally(len(self.sources))

    def ends_interval(self, iteration: int) -> bool:
        """Whether an interval, or training, ends with an iteration."""
        return iteration % self.interval == 0 or iteration == self.iterations

    def end_iteration(self, iteration: int, **more: Any) -> None:
        """Close an iteration, counted from 1; where it ends an interval, reports that, and what others say of it."""
        self.closed.append(self.tally)
        self.tally = Tally(len(self.sources))
        if self.ends_interval(iteration):
            self._report(iteration, more)
            self.closed, self.started = [], time.perf_counter()

    def _report(self, iteration: int, more: dict[str, Any]) -> None:
        sizes, losses = gather(self.closed)
        seconds = time.perf_counter() - self.started
        report = interval_report(sizes, losses, seconds, self.sources)
        report |= self.pace.of(sizes, seconds) if self.pace else {}
        self.consumed_samples += report["samples"]
        position = {
            "iterations": self.iterations,
            "consumed_samples": self.consumed_samples,
            "epoch": self.consumed_samples / self.samples_per_epoch,
        }
        self.journal.training(iteration, {**position, **report, **more})


class EvaluationMeter:
    """Reports what a pass over the held-out packs found: the mean over all of its counted tokens, exactly."""

    def __init__(self, sources: Sequence[str], iterations: int, journal: Journal) -> None:
        self.sources, self.iterations, self.journal = tuple(sources), iterations, journal
        self.done = 0
        self.started = 0.0
        self.tally = Tally(len(self.sources))

    def begin_iteration(self) -> None:
        """The first one of a pass starts the clock."""
        if self.done == 0:
            self.started = time.perf_counter()

    def end_iteration(self) -> bool:
        """Whether the pass is complete; the next iteration begins another."""
        self.done = (self.done + 1) % self.iterations
        return self.done == 0

    def end_pass(self, iteration: int) -> float:
        """Report a pass after `iteration` iterations of training; what it took, in seconds."""
        sizes, losses = gather([self.tally])
        seconds = time.perf_counter() - self.started
        samples = int(sizes[..., SIZES.index("samples")].sum())
        self.journal.evaluation(
            iteration, {**mean_losses(losses, self.sources), "samples": samples, "seconds": seconds}
        )
        self.tally = Tally(len(self.sources))
        return seconds


def gather(tallies: Sequence[Tally]) -> tuple[Tensor, Tensor]:
    """Sizes [ranks, tallies, sizes] and losses [sources, 2] over all data-parallel ranks; waits for the device once."""
    sizes = torch.tensor([tally.sizes for tally in tallies], dtype=torch.float64)
    losses = torch.stack([tally.losses for tally in tallies]).sum(0)
    mine = torch.cat([sizes.to(losses.device).flatten(), losses.flatten()])
    everything = of_all_ranks(mine, parallel_state.get_data_parallel_group()).cpu()
    return everything[:, : sizes.numel()].view(-1, *sizes.shape), everything[:, sizes.numel() :].sum(0).view(-1, 2)


def of_all_ranks(mine: Tensor, group: ProcessGroup) -> Tensor:
    """[ranks of the group, ...]: what each of them has; alike in shape."""
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(parts, mine.contiguous(), group=group)
    return torch.stack(parts)


def interval_report(sizes: Tensor, losses: Tensor, seconds: float, sources: Sequence[str]) -> dict[str, Any]:
    """Rates, padding and DistRatios (OmniBal, section 3) of an interval.

    sizes [ranks, iterations, sizes]: what each rank ran in each iteration, see `SIZES`; losses [sources, 2] of all.
    """
    tiles, tokens, useful, samples, squares, *_ = sizes.unbind(-1)
    return {
        "seconds": seconds,
        **mean_losses(losses, sources),
        "samples": int(samples.sum()),
        "samples_per_second": samples.sum().item() / seconds,
        "useful_tokens_per_second": useful.sum().item() / seconds,
        "padding": 1 - useful.sum().item() / max(1.0, tokens.sum().item()),
        "dist_ratio_vit": _dist_ratio(tiles),
        "dist_ratio_llm": _dist_ratio(tokens),
        "dist_ratio_attention": _dist_ratio(squares),
    }


def mean_losses(losses: Tensor, sources: Sequence[str]) -> dict[str, Any]:
    """The mean loss over all tokens that count, and over those of each source that has any; losses [sources, 2].

    None where no token counts: every step was left out, say.
    """
    totals, weights = losses.unbind(-1)
    counted = [source for source, weight in enumerate(weights.tolist()) if weight]
    return {
        "loss": totals.sum().item() / weights.sum().item() if counted else None,
        "source_losses": {sources[i]: totals[i].item() / weights[i].item() for i in counted},
    }


def _dist_ratio(work: Tensor) -> float:
    """Mean over iterations of sum_i (T_max - T_i) / (T_max N); work [ranks, iterations]."""
    most = work.max(dim=0).values
    waiting = ((most - work) / most.clamp(min=1)).mean(dim=0)
    return waiting.mean().item()
