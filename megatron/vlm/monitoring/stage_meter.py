"""Measures seconds of every stage, the bubble and peak bytes of every rank, for the run's metrics.

1. The first iterations warm up and are not timed.
2. In all others, events are recorded before and after every action. They are read at the end of the iteration, when the
   device has finished it, since the gradient norm has been read.
3. At the end of an interval the timings of its iterations are gathered over all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron.vlm.monitoring.meters import all_gathered
from megatron.vlm.platform import Moment, peak_bytes, to_device
from omnibal_ext.plan import Plan
from omnibal_ext.schedules.actions import VISION, Action

WARM_UP = 2  # iterations


class StageMeter:
    """Times the actions of training iterations; every rank makes the same calls."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.iterations = 0
        self.timing = False
        self.actions: list[tuple[int, Moment, Moment]] = []
        """(chunk, start, end) of each action of this iteration; a replicated tower counts as the last chunk."""
        self.timed: list[list[float]] = []
        """[iterations][chunks + 1]: seconds of work of each chunk (a replicated tower is the last), and from the
        first start to the last end."""

    @contextmanager
    def iteration(self, training: bool) -> Iterator[None]:
        """Wraps the actions of one iteration; if it is rerun, only the last run counts."""
        self.actions, self.timing = [], training and self.iterations >= WARM_UP
        yield
        self.timing = False

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        """Wraps the computation of one action."""
        if not self.timing:
            yield
            return
        started = Moment()
        yield
        chunks = self.plan.virtual_pipeline_model_parallel_size
        self.actions.append((chunks if action.kind in VISION else action.chunk, started, Moment()))

    def end_iteration(self) -> None:
        """Read the timings of a training iteration, which the device has finished."""
        self.iterations += 1
        if not self.actions:
            return
        worked = [0.0] * (self.plan.virtual_pipeline_model_parallel_size + (self.plan.tower is not None))
        for chunk, start, end in self.actions:
            worked[chunk] += start.seconds_until(end)
        self.timed.append([*worked, self.actions[0][1].seconds_until(self.actions[-1][2])])
        self.actions = []

    def end_interval(self) -> dict[str, Any]:
        """Metrics of the iterations since the last call; collective, after the same number of iterations on every rank.

        bubble                 idle share of the ranks' time, from the first start to the last end of work
        stage_seconds[stage]   of a microbatch, forward and backward
        stage_peak_bytes[rank] per pipeline rank, since the start; on GPUs only
        """
        if not self.timed:
            return {}
        worked, spans, peaks = gather_timings(torch.tensor(self.timed, dtype=torch.float64), peak_bytes())
        self.timed = []
        places = map(self.plan.placement.rank_and_chunk, range(len(self.plan.stages)))
        stages = torch.stack([worked[:, rank, :, chunk] for rank, chunk in places], dim=-1).mean(dim=(0, 1))
        seconds = (stages / self.plan.num_microbatches).tolist()
        found = {"bubble": bubble(worked, spans), "stage_seconds": seconds}
        return found | ({"stage_peak_bytes": peaks} if any(peaks) else {})


def gather_timings(timed: Tensor, peak: int | None) -> tuple[Tensor, Tensor, list[int]]:
    """Gather `timed` [iterations, chunks + 1] seconds and peak bytes over the ranks that share a tensor-parallel rank.

    Returns seconds of work [data-parallel ranks, pipeline ranks, iterations, chunks], seconds from first start to last
    end (the same without chunks), and for each pipeline rank the most bytes of its replicas (0: unknown).
    """
    mine = torch.cat([timed.flatten(), torch.tensor([float(peak or 0)], dtype=torch.float64)])
    pipeline = all_gathered(to_device(mine), parallel_state.get_pipeline_model_parallel_group())
    replicas = all_gathered(pipeline, parallel_state.get_data_parallel_group()).cpu()
    table = replicas[..., :-1].unflatten(-1, timed.shape)
    return table[..., :-1], table[..., -1], [int(most) for most in replicas[..., -1].amax(dim=0)]


def bubble(worked: Tensor, spans: Tensor) -> float:
    """Idle share of a pipeline's time, mean over iterations and replicas; arguments as from `gather_timings`.

    A pipeline's time is the longest span of its ranks: that of the rank where forwards begin and backwards end.
    """
    total = spans.amax(dim=1) * spans.shape[1]
    return (1 - worked.sum(dim=(1, 3)) / total.clamp(min=1e-12)).mean().item()
