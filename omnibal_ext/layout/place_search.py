"""The search for where E and V stand and who encodes what: what they are judged by, where it starts, how long it is.

Starts are all E first and V last, and just in time, for a few ways to deal microbatches to ranks. Of every dealing the
fastest start is annealed (`placing`) on the mean of all packs; then the fastest of all on some iterations.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.layout.beside import TowerBeside, largest_share, part_seconds
from omnibal_ext.layout.placing import NONE, Costs, anneal_places, judge_places
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.schedules.actions import Beside
from omnibal_ext.schedules.weaving import Places, first_and_last, in_time

WARM, COLD = 0.05, 0.003
"""First and last temperature, of the mean seconds of an E."""
A_CHANGE, AN_ACTION, A_CASE = 4e-6, 1.2e-8, 4e-9
"""Seconds of an idle core, about: of a change, beside each action; of an action in each case."""
SHARE_OF_MEAN = 0.7
"""Of the changes: on the mean of all cases; the others are judged on some iterations."""
SOME_CASES = 16


def searched_places(alone: LayoutProblem, every: Costs, aside: TowerBeside, seconds: float) -> list[Ints]:
    """Places to choose from, the fastest first: starts, and what annealing makes of the fastest of every dealing."""
    mean, some = _mean(every), _some(every)
    dealings = starts_of(alone, not aside.costs.trained)
    typical = float(mean.parts[0, 0].mean()) or 1.0
    actions = every.actions.shape[0] * every.actions.shape[1]
    found = [places for starts in dealings for places in starts]
    changes = int(SHARE_OF_MEAN * seconds / len(dealings) / (A_CHANGE + actions * (AN_ACTION + A_CASE)))
    for seed, starts in enumerate(dealings):
        start = min(starts, key=lambda places: judge_places(places, mean))
        found.append(anneal_places(start, mean, changes, WARM * typical, COLD * typical, seed)[0])
    fastest = min(found, key=lambda places: judge_places(places, some))
    cases = some.seconds.shape[3]
    changes = int((1 - SHARE_OF_MEAN) * seconds / (A_CHANGE + actions * (AN_ACTION + A_CASE * cases)))
    found.append(anneal_places(fastest, some, changes, COLD * 5 * typical, COLD * typical, len(found))[0])
    return sorted(found, key=lambda places: judge_places(places, some))


def starts_of(alone: LayoutProblem, ahead: bool) -> list[list[Ints]]:
    """For every dealing of `dealings`: all first and last, and just in time."""
    found = []
    for parts in dealings(alone.ranks, alone.microbatches):
        beside = Beside(parts, ahead)
        shape = (alone.schedule, alone.microbatches, alone.placement, beside)
        given = [first_and_last(alone.schedule, beside)]
        given += [in_time(*shape, early, together) for early in (2, 4 * alone.ranks) for together in (1, alone.ranks)]
        found.append([as_array(places, alone.ranks, alone.microbatches) for places in given])
    return found


def dealings(ranks: int, microbatches: int) -> list[tuple[tuple[int, ...], ...]]:
    """Ranks that encode each microbatch: one after the other, all, half of them, all of those at both ends."""
    everyone, half = tuple(range(ranks)), ranks // 2
    one = [((m + 1) % ranks,) for m in range(microbatches)]
    across = [tuple(sorted({(m + 1) % ranks, (m + 1 + half) % ranks})) for m in range(microbatches)]
    halves = [everyone[:half] if m % 2 else everyone[half:] for m in range(microbatches)]
    ends = [m < half or m >= microbatches - half for m in range(microbatches)]
    return [
        tuple(one),
        tuple(everyone if m < ranks else parts for m, parts in enumerate(one)),
        (everyone,) * microbatches,
        tuple(across),
        tuple(halves),
        tuple(everyone if end else parts for end, parts in zip(ends, across, strict=True)),
    ]


def as_array(places: Places, ranks: int, microbatches: int) -> Ints:
    """int64 [2, ranks, microbatches]: where E and V stand, `NONE` where a rank has no part."""
    found = np.full((2, ranks, microbatches), NONE, dtype=np.int64)
    for rank, mine in enumerate(places):
        for place, action in mine:
            found["EV".index(action.kind), rank, action.microbatch] = place
    return found


def place_costs(
    problem: LayoutProblem, alone: LayoutProblem, layout: Layout, aside: TowerBeside, waiting: float
) -> Costs:
    """What places are judged by, on the layout's own seconds; `waiting`: bytes of outputs that a rank has room for."""
    cases = [alone.stage_costs(layout, case) for case in range(alone.cases[0] * alone.cases[1])]
    split = alone.program.split_backward
    seconds = np.stack([[c.forward, c.backward - c.weight * split, c.weight] for c in cases], axis=-1)
    counts = np.arange(1, problem.ranks + 1)
    profile, way = problem.profile, aside.tower
    tensor = profile.tensor_model_parallel_size
    loads = np.stack([largest_share(aside.tiles, int(k) * tensor, aside.costs.unit) for k in counts])
    parts = part_seconds(aside.costs, loads, way) + profile.action_seconds
    hops = profile.transfer_latency_seconds + profile.transfer_seconds_per_byte * aside.costs.output_bytes * loads
    full = largest_share(np.array(float(profile.vit_budget)), counts * tensor, aside.costs.unit)
    kept = full * aside.costs.kept_bytes(way.recompute)
    working = full[0] * aside.costs.working_bytes(way.recompute)
    peaks = np.array(replace(alone, memory_bytes=np.inf).stage_peak_bytes(layout))
    step = alone.placement.by_rank(cases[0].step) + aside.step
    return Costs(
        actions=_actions(alone),
        seconds=np.ascontiguousarray(seconds),
        links=np.ascontiguousarray(np.stack([c.transfer for c in cases], axis=-1)),
        parts=np.ascontiguousarray(parts.transpose(1, 0, 3, 2)),
        hops=np.ascontiguousarray(hops.transpose(0, 2, 1)),
        kept=np.repeat(kept[:, None], problem.microbatches, axis=1),
        room=problem.memory_bytes - peaks - aside.fixed_bytes - working - waiting,
        step=step,
        ranks_of=np.array(alone.placement.ranks_of),
        ahead=not aside.costs.trained,
        replicas=alone.cases[1],
    )


def _actions(alone: LayoutProblem) -> Ints:
    stages_of = alone.placement.stages_of
    return np.array(
        [
            [("FBW".index(a.kind), stages_of[rank][a.chunk], a.microbatch) for a in actions]
            for rank, actions in enumerate(alone.schedule)
        ],
        dtype=np.int64,
    )


def _mean(costs: Costs) -> Costs:
    means: dict[str, Any] = {
        name: np.ascontiguousarray(getattr(costs, name).mean(axis=-1, keepdims=True))
        for name in ("seconds", "links", "parts", "hops")
    }
    return costs._replace(**means, replicas=1)


def _some(costs: Costs) -> Costs:
    """Some iterations: as many as make up `SOME_CASES`, at least one."""
    cases = max(1, SOME_CASES // costs.replicas) * costs.replicas
    some: dict[str, Any] = {
        name: np.ascontiguousarray(getattr(costs, name)[..., :cases]) for name in ("seconds", "links", "parts", "hops")
    }
    return costs._replace(**some)
