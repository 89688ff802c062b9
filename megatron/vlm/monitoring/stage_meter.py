"""Does training run as planned? Seconds of every stage, the bubble and bytes of every rank, beside what the plan says.

1. The first iterations warm up: nothing is timed.
2. In all others a moment is taken before and after every action. They are compared when the iteration has ended: by
   then the device is through with it, as the norm of its gradients has been read.
3. At the end of an interval the figures of its iterations are gathered over all ranks, once.
4. A stage that in three of four iterations has another share of the work than planned is named, once.
"""

import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import print_rank_last
from torch import Tensor

from megatron.vlm.monitoring.meters import of_all_ranks
from megatron.vlm.platform import Moment, peak_bytes, to_device
from omnibal_ext.output import printable
from omnibal_ext.plan import Plan
from omnibal_ext.schedules.actions import VISION, Action
from omnibal_ext.units import in_bytes

WARM_UP = 2  # iterations
TOLERATED = 0.2
"""By how much a stage's share of the work may differ from the plan's."""
SAID, JUDGED = 3, 8
"""After so many iterations it is said how the stages are, and it is judged whether they drift, by the last ones."""


class StageMeter:
    """Times the actions of training; every rank calls it alike."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.iterations = 0
        self.timing = False
        self.actions: list[tuple[int, Moment, Moment]] = []
        """(chunk, start, end) of each action of this iteration; a tower beside the pipeline is one chunk more."""
        self.timed: list[list[float]] = []
        """An iteration each: seconds of work of each chunk of this rank, and of a tower beside the pipeline; and from
        its first start to its last end."""
        self.recent: deque[list[float]] = deque(maxlen=JUDGED)
        """An iteration each: seconds of a microbatch on each stage."""
        self.said = self.warned = False

    @contextmanager
    def iteration(self, training: bool) -> Iterator[None]:
        """Around the actions of one iteration; one that is run again counts as it ran last."""
        self.actions, self.timing = [], training and self.iterations >= WARM_UP
        yield
        self.timing = False

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        """Around the computing of one action."""
        if not self.timing:
            yield
            return
        started = Moment()
        yield
        chunks = self.plan.virtual_pipeline_model_parallel_size
        self.actions.append((chunks if action.kind in VISION else action.chunk, started, Moment()))

    def end_iteration(self) -> None:
        """An iteration of training is over, on the device too."""
        self.iterations += 1
        if not self.actions:
            return
        worked = [0.0] * (self.plan.virtual_pipeline_model_parallel_size + (self.plan.tower is not None))
        for chunk, start, end in self.actions:
            worked[chunk] += start.seconds_until(end)
        self.timed.append([*worked, self.actions[0][1].seconds_until(self.actions[-1][2])])
        self.actions = []

    def end_interval(self) -> dict[str, Any]:
        """What the iterations since the last call were; every rank calls it, after as many iterations.

        bubble                 share of the ranks' time, from first start to last end of work, in which they wait
        stage_seconds[stage]   of a microbatch, forward and backward
        tower_seconds[rank]    of the pipeline, of all microbatches; only of a tower beside it
        stage_peak_bytes[rank] of the pipeline, the most since the start; only where there are GPUs
        """
        if not self.timed:
            return {}
        everyone = gathered(torch.tensor(self.timed, dtype=torch.float64), peak_bytes())
        self.timed = []
        stages = torch.stack([everyone.worked[:, rank, :, chunk] for rank, chunk in self._places()], dim=-1)
        stages = stages.mean(dim=0) / self.plan.num_microbatches
        self.recent += stages.tolist()
        report = {"bubble": bubble(everyone.worked, everyone.spans), "stage_seconds": stages.mean(dim=0).tolist()}
        if self.plan.tower:
            report["tower_seconds"] = everyone.worked[..., -1].mean(dim=(0, 2)).tolist()
        report |= {"stage_peak_bytes": everyone.peaks} if any(everyone.peaks) else {}
        self._compare(report)
        return report

    def _places(self) -> list[tuple[int, int]]:
        return [*map(self.plan.placement.rank_and_chunk, range(len(self.plan.stages)))]

    def _compare(self, report: dict[str, Any]) -> None:
        """Say once how the stages are beside the plan, and once that one of them is not as planned."""
        if "stage_seconds" not in self.plan.predicted:
            return
        if not self.said and len(self.recent) >= SAID:
            self.said = True
            print_rank_last(printable(beside_plan(self.plan, self.recent, report)))
        if not self.warned and (warning := drift_warning(self.plan, self.recent)):
            self.warned = True
            print_rank_last(printable(warning))


@dataclass(frozen=True)
class Everyone:
    """What all ranks of one tensor-parallel number have timed."""

    worked: Tensor
    """[data-parallel ranks, pipeline ranks, iterations, chunks] seconds; a tower beside the pipeline is one more."""
    spans: Tensor
    """[data-parallel ranks, pipeline ranks, iterations] seconds from first start to last end."""
    peaks: list[int]
    """[pipeline ranks] bytes, of the replica that has most; 0: not known."""


def gathered(timed: Tensor, peak: int | None) -> Everyone:
    """What this rank has timed [iterations, chunks + 1], and the bytes it held at most, of all ranks."""
    mine = torch.cat([timed.flatten(), torch.tensor([float(peak or 0)], dtype=torch.float64)])
    pipeline = of_all_ranks(to_device(mine), parallel_state.get_pipeline_model_parallel_group())
    replicas = of_all_ranks(pipeline, parallel_state.get_data_parallel_group()).cpu()
    table = replicas[..., :-1].unflatten(-1, timed.shape)
    return Everyone(table[..., :-1], table[..., -1], [int(most) for most in replicas[..., -1].amax(dim=0)])


def bubble(worked: Tensor, spans: Tensor) -> float:
    """Mean over iterations and replicas of the share of a pipeline's time that is waiting; see `Everyone`.

    A pipeline's time is the longest span of a rank of it: that of the rank on which forwards begin and backwards end.
    """
    whole = spans.amax(dim=1) * spans.shape[1]
    return (1 - worked.sum(dim=(1, 3)) / whole.clamp(min=1e-12)).mean().item()


def drifts(plan: Plan, microbatch: Sequence[float]) -> list[float]:
    """By how much each stage's share of the work differs from the plan's (0.1: a tenth more).

    A plan is a cut: it is wrong where stages have other shares of the work than it says. A machine on which all of it
    takes longer by one factor needs no other.
    """
    predicted = plan.predicted["stage_seconds"]
    pace = sum(microbatch) / max(sum(predicted), 1e-12)
    return [found / max(expected * pace, 1e-12) - 1 for found, expected in zip(microbatch, predicted, strict=True)]


def beside_plan(plan: Plan, iterations: Sequence[Sequence[float]], report: Mapping[str, Any]) -> str:
    """Medians over iterations of what a microbatch takes on each stage, bubble and bytes, beside what the plan says."""
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
    """What to say of a stage that drifts in three of four iterations, to the same side; "" if none does.

    What disturbs a machine now and then, and packs that are not as the mean of them, are no drift.
    """
    if len(iterations) < JUDGED:
        return ""
    by_stage = list(zip(*(drifts(plan, microbatch) for microbatch in iterations), strict=True))
    quartiles = [statistics.quantiles(stage, n=4) for stage in by_stage]
    surely = [low if low > 0 else high if high < 0 else 0.0 for low, _, high in quartiles]
    worst = max(range(len(surely)), key=lambda number: abs(surely[number]))
    if abs(surely[worst]) <= TOLERATED:
        return ""
    freeze = f"--freeze {' '.join(plan.frozen)} " if plan.frozen else ""
    if plan.lora_rank:
        freeze = f"--lora-rank {plan.lora_rank} --lora-targets {' '.join(plan.lora_targets)} "
    memory = f" --memory-gib {plan.memory_gib:g}" if plan.memory_gib is not None else ""
    return (
        f" stage {worst} drifts from the plan by {quartiles[worst][1]:+.0%}: the cut is not level here. Measure "
        "again and plan again, with this run's --bf16, --sequence-parallel, --use-distributed-optimizer, "
        "--data-parallel-size where it has them:\n"
        f" python tools/profile_layers.py --model {plan.model} --vit-budget {plan.vit_budget} "
        f"--llm-budget {plan.llm_budget} --tensor-model-parallel-size {plan.tensor_model_parallel_size} "
        f"--expert-model-parallel-size {plan.expert_model_parallel_size} {freeze}--force "
        "--output profile.json\n"
        f" python tools/plan_layout.py --profile profile.json --packs PACKS --output plan.json "
        f"--pipeline-model-parallel-size {plan.pipeline_model_parallel_size} "
        f"--virtual-pipeline-model-parallel-size {plan.virtual_pipeline_model_parallel_size} "
        f"--num-microbatches {plan.num_microbatches} --schedule {plan.schedule} --method {plan.method}{memory}"
    )
