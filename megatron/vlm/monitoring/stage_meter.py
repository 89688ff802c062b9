"""Compares seconds of every stage, the bubble and peak bytes of every rank with the plan's predictions.

1. The first iterations warm up and are not timed.
2. In all others, events are recorded before and after every action. They are read at the end of the iteration, when the
   device has finished it, since the gradient norm has been read.
3. At the end of an interval the timings of its iterations are gathered over all ranks.
4. A stage whose share of the work differs from the plan in three of four iterations is reported once.
"""

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import print_rank_last
from torch import Tensor

from megatron.vlm.monitoring.meters import all_gathered
from megatron.vlm.platform import Moment, peak_bytes, to_device
from omnibal_ext.output import printable
from omnibal_ext.plan import Plan
from omnibal_ext.schedules.actions import VISION, Action
from omnibal_ext.units import in_bytes

WARM_UP = 2  # iterations
TOLERANCE = 0.2
"""Relative difference between a stage's measured and planned share of the work above which it drifts."""
COMPARED_AFTER, DRIFT_WINDOW = 3, 8
"""Iterations until stages are compared with the plan; number of last iterations from which drift is judged."""


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
        self.recent: deque[list[float]] = deque(maxlen=DRIFT_WINDOW)
        """[iterations][stages]: seconds of a microbatch."""
        self.said = self.warned = False

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
        stages = torch.stack([worked[:, rank, :, chunk] for rank, chunk in self._ranks_and_chunks()], dim=-1)
        stages = stages.mean(dim=0) / self.plan.num_microbatches
        self.recent += stages.tolist()
        report = {"bubble": bubble(worked, spans), "stage_seconds": stages.mean(dim=0).tolist()}
        report |= {"stage_peak_bytes": peaks} if any(peaks) else {}
        self._compare(report)
        return report

    def _ranks_and_chunks(self) -> list[tuple[int, int]]:
        return [*map(self.plan.placement.rank_and_chunk, range(len(self.plan.stages)))]

    def _compare(self, report: dict[str, Any]) -> None:
        """Print once how the stages compare with the plan, and once if a stage drifts."""
        if "stage_seconds" not in self.plan.predicted:
            return
        if not self.said and len(self.recent) >= COMPARED_AFTER:
            self.said = True
            print_rank_last(printable(comparison_with_plan(self.plan, self.recent, report)))
        if not self.warned and (warning := drift_warning(self.plan, self.recent)):
            self.warned = True
            print_rank_last(printable(warning))


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


def drifts(plan: Plan, microbatch: Sequence[float]) -> list[float]:
    """Relative difference of each stage's share of the work from the plan's (0.1: a tenth more).

    Shares, not seconds: a machine that is slower by one factor on all stages needs no other cut.
    """
    predicted = plan.predicted["stage_seconds"]
    pace = sum(microbatch) / max(sum(predicted), 1e-12)
    return [found / max(expected * pace, 1e-12) - 1 for found, expected in zip(microbatch, predicted, strict=True)]


def comparison_with_plan(plan: Plan, iterations: Sequence[Sequence[float]], report: Mapping[str, Any]) -> str:
    """The log line with each stage's median seconds of a microbatch, bubble and peak bytes, against the predictions."""
    medians, predicted = [statistics.median(stage) for stage in zip(*iterations, strict=True)], plan.predicted
    stages = [
        f"stage {number}: {found * 1e3:.1f} ms, predicted {expected * 1e3:.1f} ({drift:+.0%} of its share)"
        for number, (found, expected, drift) in enumerate(
            zip(medians, predicted["stage_seconds"], drifts(plan, medians), strict=True)
        )
    ]
    pace = sum(medians) / max(sum(predicted["stage_seconds"]), 1e-12)
    words = [*stages, f"all {pace:.2f} x predicted"]
    if "bubble_fraction" in predicted:
        words.append(f"bubble {report['bubble']:.1%}, predicted {predicted['bubble_fraction']:.1%}")
    for rank, (found, expected) in enumerate(
        zip(report.get("stage_peak_bytes", ()), predicted.get("stage_peak_bytes", ()), strict=False)
    ):
        words.append(f"rank {rank}: {in_bytes(found)}, predicted {in_bytes(expected)}")
    return f" a microbatch | {' | '.join(words)} |"


def drift_warning(plan: Plan, iterations: Sequence[Sequence[float]]) -> str:
    """A warning about the stage that drifts most, in one direction in three of four iterations; "" if none does.

    So occasional disturbances, and packs far from the mean, are not reported.
    """
    if len(iterations) < DRIFT_WINDOW:
        return ""
    by_stage = list(zip(*(drifts(plan, microbatch) for microbatch in iterations), strict=True))
    quartiles = [statistics.quantiles(stage, n=4) for stage in by_stage]
    surely = [low if low > 0 else high if high < 0 else 0.0 for low, _, high in quartiles]
    worst = max(range(len(surely)), key=lambda number: abs(surely[number]))
    if abs(surely[worst]) <= TOLERANCE:
        return ""
    return (
        f" stage {worst} drifts from the plan by {quartiles[worst][1]:+.0%}: stages are not balanced on this machine; "
        "to plan again, stop this run and start tools/launch.py again with --replan"
    )
