"""Search for the positions of E and V in the lists, and for the ranks that encode each microbatch.

It starts with all E first and all V last, and with both just in time, for a few ways to assign microbatches to ranks.
Of every assignment the fastest start is annealed (`anneal`) on the mean of all packs; then the fastest of all on some
iterations.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.layout.anneal import ENCODERS, anneal, judged
from omnibal_ext.layout.beside import TowerBeside, largest_share, part_seconds
from omnibal_ext.layout.lists import costs_of, mean_of, of_cases, state_of
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.state import Costs, State
from omnibal_ext.schedules.actions import Beside
from omnibal_ext.schedules.weaving import first_and_last, in_time

WARM, COLD = 0.05, 0.003
"""First and last temperature, as shares of the mean seconds of an E."""
A_CHANGE, AN_ACTION, A_CASE = 4e-6, 1.2e-8, 4e-9
"""Seconds on an idle core, about: for a change, for each action, and for each action in each case."""
SHARE_OF_MEAN = 0.7
"""Share of the changes that are judged on the mean of all cases; the others on some iterations."""
SOME_CASES = 16
"""Number of cases, about, of the iterations that the others are judged on; at least one whole iteration."""


def searched_insertions(
    language: LayoutProblem, layout: Layout, costs: Costs, beside: TowerBeside, seconds: float
) -> list[Ints]:
    """Search positions of E and V, and the ranks that encode; return insertion points int64 [2, ranks, microbatches],
    fastest first: all starts, and what annealing made of the best. `seconds` of counted work."""
    some_cases = max(1, SOME_CASES // costs.replicas) * costs.replicas
    some = of_cases(costs, lambda table: table[..., :some_cases], costs.replicas)
    mean, state = mean_of(costs), state_of(language, layout)
    starts_of_each = starts_of(language, not beside.costs.trained)
    typical = float(mean.tower_seconds[0, 0].mean()) or 1.0
    found = [state._replace(insertions=insertions) for starts in starts_of_each for insertions in starts]

    def search(start: State, costs: Costs, share: float, warm: float, seed: int) -> None:
        a_change = A_CHANGE + state.kinds.size * (AN_ACTION + A_CASE * costs.tower_seconds.shape[-1])
        changes = int(share * seconds / a_change)
        found.append(anneal(start, costs, ENCODERS, changes, warm * typical, COLD * typical, seed)[0])

    for seed, starts in enumerate(starts_of_each):
        start = min(starts, key=lambda insertions: judged(state._replace(insertions=insertions), mean))
        search(state._replace(insertions=start), mean, SHARE_OF_MEAN / len(starts_of_each), WARM, seed)
    fastest = min(found, key=lambda one: judged(one, some))
    search(fastest, some, 1 - SHARE_OF_MEAN, 5 * COLD, len(found))
    return [one.insertions for one in sorted(found, key=lambda one: judged(one, some))]


def starts_of(language: LayoutProblem, ahead: bool) -> list[list[Ints]]:
    """Return insertion points to start from, for each of `assignments`: E first and V last; both just in time."""
    found = []
    for encoding_ranks in assignments(language.ranks, language.microbatches):
        beside = Beside(encoding_ranks, ahead)
        shape = (language.schedule, language.microbatches, language.placement, beside)
        soon = [
            in_time(*shape, early, together) for early in (2, 4 * language.ranks) for together in (1, language.ranks)
        ]
        found.append([first_and_last(language.schedule, beside), *soon])
    return found


def assignments(ranks: int, microbatches: int) -> list[tuple[tuple[int, ...], ...]]:
    """Return six choices of every microbatch's encoding ranks: one, in turn; all for the first microbatches, then one;
    all; two, in turn; either half; all for the outer microbatches, else two."""
    everyone, half = tuple(range(ranks)), ranks // 2
    one = [((m + 1) % ranks,) for m in range(microbatches)]
    across = [tuple(sorted({(m + 1) % ranks, (m + 1 + half) % ranks})) for m in range(microbatches)]
    halves = [everyone[:half] if m % 2 else everyone[half:] for m in range(microbatches)]
    ends = [m < half or m >= microbatches - half for m in range(microbatches)]
    return [
        tuple(one),
        tuple(everyone if m < ranks else few for m, few in enumerate(one)),
        (everyone,) * microbatches,
        tuple(across),
        tuple(halves),
        tuple(everyone if end else few for end, few in zip(ends, across, strict=True)),
    ]


def insertion_costs(
    problem: LayoutProblem, language: LayoutProblem, layout: Layout, beside: TowerBeside, waiting: float
) -> Costs:
    """Return the costs by which insertion points are compared. Layers take no bytes in them: each rank's `room` is what
    the language model's peak, the tower, and `waiting` bytes of its outputs leave."""
    profile, tower, costs, counts = problem.profile, beside.tower, costs_of(language), np.arange(1, problem.ranks + 1)
    tensor = profile.tensor_model_parallel_size
    of_counts = [largest_share(beside.costs, beside.whole, int(k) * tensor) for k in counts]
    loads = {size: np.stack([load[size] for load in of_counts]) for size in beside.whole}
    tower_seconds = part_seconds(beside.costs, loads, tower) + profile.action_seconds
    hops = profile.transfer_latency_seconds + beside.costs.transfer_seconds(loads)
    full = largest_share(beside.costs, beside.costs.full_pack, counts * tensor)
    kept, working = (
        beside.costs.total(partial(of_unit, recompute=tower.recompute), full)
        for of_unit in (beside.costs.kept_bytes, beside.costs.working_bytes)
    )
    peaks = np.array(replace(language, memory_bytes=np.inf).stage_peak_bytes(layout))
    return costs._replace(
        tower_seconds=np.ascontiguousarray(tower_seconds.transpose(1, 0, 3, 2)),
        hops=np.ascontiguousarray(hops.transpose(0, 2, 1)),
        bytes=np.zeros_like(costs.bytes),
        received=np.zeros_like(costs.received),
        saved=np.zeros_like(costs.saved),
        encoded=kept,
        room=problem.memory_bytes - peaks - beside.fixed_bytes - working[0] - waiting,
        rank_step=costs.rank_step + beside.step,
        ahead=not beside.costs.trained,
    )
