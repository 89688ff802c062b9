"""Does training run as planned? Measured seconds of every stage against the plan, once, after the first iterations."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.training import print_rank_last

from megatron.vlm.platform import Moment
from omnibal_ext.plan import Plan
from omnibal_ext.schedule import Action

WARM_UP, TIMED = 2, 3  # iterations
TOLERATED = 0.2
"""By how much a stage's share of the work may differ from the plan's."""


class DriftMeter:
    """Times the actions of some iterations, and says how far each stage is from its prediction.

    1. The first iterations warm up: nothing is timed.
    2. In the next ones a moment is taken before and after every action; nothing waits for it.
    3. Then each rank's figures are gathered over its pipeline and compared; no more is timed.

    Plans without predictions (written by hand) are not compared.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.iterations = 0
        self.timing = False
        self.actions: defaultdict[tuple[int, int], list[tuple[Moment, Moment]]] = defaultdict(list)
        """By iteration and chunk: start and end of each action that was timed."""

    @contextmanager
    def iteration(self, training: bool) -> Iterator[None]:
        """Around one iteration of all pipeline ranks."""
        predicted = "stage_seconds" in self.plan.predicted
        self.timing = training and predicted and WARM_UP <= self.iterations < WARM_UP + TIMED
        yield
        self.iterations += training
        if self.timing and self.iterations == WARM_UP + TIMED:
            self._report()
        self.timing = False

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        """Around the computing of one action."""
        if not self.timing:
            yield
            return
        started = Moment()
        yield
        self.actions[self.iterations, action.chunk].append((started, Moment()))

    def _report(self) -> None:
        mine = {
            chunk: statistics.median(  # an iteration that something disturbed is no drift
                sum(start.seconds_until(end) for start, end in moments) / self.plan.num_microbatches
                for (_, of), moments in self.actions.items()
                if of == chunk
            )
            for chunk in {chunk for _, chunk in self.actions}
        }
        group = parallel_state.get_pipeline_model_parallel_group()
        ranks: list[dict[int, float]] = [{} for _ in range(group.size())]
        torch.distributed.all_gather_object(ranks, mine, group=group)
        places = map(self.plan.rank_and_chunk, range(len(self.plan.stages)))
        print_rank_last(drift_report(self.plan, [ranks[rank].get(chunk, 0.0) for rank, chunk in places]))


def drift_report(plan: Plan, measured: list[float]) -> str:
    """What there is to say of the measured seconds of a microbatch on each stage, forward and backward.

    A plan is a cut: it is wrong where stages have other shares of the work than it says. A machine on which all of it
    takes longer by one factor needs no other.
    """
    predicted = plan.predicted["stage_seconds"]
    pace = sum(measured) / max(sum(predicted), 1e-12)
    drifts = [found / max(expected * pace, 1e-12) - 1 for found, expected in zip(measured, predicted, strict=True)]
    stages = [
        f"stage {number}: {found * 1e3:.1f} ms, predicted {expected * 1e3:.1f} ({drift:+.0%} of its share)"
        for number, (found, expected, drift) in enumerate(zip(measured, predicted, drifts, strict=True))
    ]
    text = f" a microbatch | {' | '.join(stages)} | all {pace:.2f} x predicted |"
    worst = max(range(len(drifts)), key=lambda number: abs(drifts[number]))
    if abs(drifts[worst]) <= TOLERATED:
        return text
    return (
        f"{text}\n stage {worst} drifts from the plan by {drifts[worst]:+.0%}: the cut is not level here. Measure "
        "again and plan again:\n"
        f" python tools/profile_layers.py --model {plan.model} --vit-budget {plan.vit_budget} "
        f"--llm-budget {plan.llm_budget} --tensor-model-parallel-size {plan.tensor_model_parallel_size} --force "
        "--output profile.json\n"
        f" python tools/plan_layout.py --profile profile.json --packs PACKS --output plan.json "
        f"--pipeline-model-parallel-size {plan.pipeline_model_parallel_size} "
        f"--virtual-pipeline-model-parallel-size {plan.virtual_pipeline_model_parallel_size} "
        f"--num-microbatches {plan.num_microbatches} --schedule {plan.schedule} --method {plan.method}"
    )
