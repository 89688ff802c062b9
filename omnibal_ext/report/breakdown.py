"""Where the time of an iteration goes, what limits it, and what changing that is predicted to give.

All ranks' time (lanes x length of the iteration) is divided into what is needed and what is not:

    needed             forwards and backwards of the layers, once
    recomputation      forwards again
    executor           between layers: what an action takes beside them
    exchange           ranks that run a pack together send each other parts of it, and wait for each other there
    late data or host  the iteration takes longer because a rank waits for its packs, or for its own host
    uneven stages      ranks wait because the slowest rank works longer than they do
    fill and drain     ranks wait for the first microbatch, behind the last, and for tensors between
    update             gradients are reduced and weights updated
    other replicas     data-parallel ranks wait for the slowest of them

A late pack holds up all ranks, but costs nothing where its rank would have waited for others: the iteration is played
again without it (`on_time`). What it is shorter by is that cause, and the others are those of what is left.
"""

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from omnibal_ext.costs.profile import PackSizes
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.report.on_time import on_time
from omnibal_ext.report.timeline import EXCHANGE, OTHER, Lane, Timeline
from omnibal_ext.units import GIB

NEEDED, RECOMPUTED, EXECUTOR, LATE = "needed", "recomputation", "executor", "late data or host"
UNEVEN, FILL, UPDATE, REPLICAS = "uneven stages", "fill and drain", "update", "other replicas"
CAUSES = (NEEDED, RECOMPUTED, EXECUTOR, EXCHANGE, LATE, UNEVEN, FILL, UPDATE, REPLICAS)
WORTH_TRYING = 0.01
"""Predicted gain from which a change is named."""


def breakdown(timeline: Timeline) -> dict[str, float]:
    """Shares of all ranks' time by cause, in the order of `CAUSES`; they add up to 1."""
    found, lanes_seconds = dict.fromkeys(CAUSES, 0.0), timeline.seconds * len(timeline.lanes)
    for (part, phase), seconds in timeline.totals().items():
        apart = {OTHER: EXECUTOR, EXCHANGE: EXCHANGE}
        found[apart.get(part, RECOMPUTED if phase == "recompute" else NEEDED)] += seconds
    prompt = on_time(timeline)
    found[LATE] = late_seconds(timeline) * len(timeline.lanes)
    for lanes in replicas(prompt).values():
        end, slowest = max(lane.end for lane in lanes), max(lane.worked for lane in lanes)
        last = max(lane.last for lane in lanes)
        for lane in lanes:
            through = min(last, lane.updates)  # its replica is, or it does not wait for that
            uneven = slowest - lane.worked
            found[UNEVEN] += uneven
            found[FILL] += through - lane.worked - uneven + end - lane.end
            found[UPDATE] += lane.end - lane.updates
            found[REPLICAS] += prompt.seconds - end + lane.updates - through
    return {cause: seconds / lanes_seconds for cause, seconds in found.items()}


def late_seconds(timeline: Timeline) -> float:
    """By which an iteration would have been shorter had data and hosts been in time."""
    return max(0.0, timeline.seconds - on_time(timeline).seconds)


def replicas(timeline: Timeline) -> dict[int, list[Lane]]:
    """The lanes of every data-parallel rank."""
    found: defaultdict[int, list[Lane]] = defaultdict(list)
    for lane in timeline.lanes:
        found[lane.data_parallel_rank].append(lane)
    return dict(found)


@dataclass(frozen=True, slots=True)
class Limit:
    """What the first screen says: the rank that paces the pipeline, and by how much."""

    lane: Lane
    stages: tuple[int, ...]
    others: float
    """Mean seconds that the other ranks of its pipeline work."""
    cause: str
    """The greatest loss, of `CAUSES`."""
    share: float

    @property
    def more(self) -> float:
        """Share by which it works longer than the others do on average."""
        return self.lane.worked / self.others - 1 if self.others else 0.0


def limit_of(timeline: Timeline) -> Limit:
    """The rank that works longest in the replica that ends last, and what costs most."""
    last = max(replicas(timeline).values(), key=lambda lanes: max(lane.end for lane in lanes))
    slowest = max(last, key=lambda lane: lane.worked)
    others = [lane.worked for lane in last if lane is not slowest]
    shares = breakdown(timeline)
    cause = max(CAUSES[1:], key=lambda name: shares[name])
    stages = tuple(sorted({span.stage for span in slowest.spans}))
    return Limit(slowest, stages, float(np.mean(others)) if others else 0.0, cause, shares[cause])


@dataclass(frozen=True, slots=True)
class Change:
    """Something to try: what, how, and the predicted gain in samples a second (0.1: a tenth more)."""

    what: str
    how: str
    gain: float


def in_time(timeline: Timeline) -> Change | None:
    """What packs that are there in time would have gained in a recorded iteration; None where that is not worth it."""
    gain = timeline.seconds / (timeline.seconds - late_seconds(timeline)) - 1
    how = "tools/launch.py -- --num-workers N, or smaller images"
    return Change("data and host in time", how, gain) if gain >= WORTH_TRYING else None


def changes(problem: LayoutProblem, layout: Layout) -> list[Change]:
    """What the simulator says of other schedules, more microbatches and no recomputation; the best first.

    Beside a tower only the last: the others' lists would have to be planned anew.
    """
    now, found = problem.step_seconds(layout), []
    anew = problem.ranks > 1 and problem.beside is None
    for name in ("1f1b", "zb_h1"):
        if name != problem.schedule_name and anew:
            other = replace(problem, schedule_name=name, lists=None)
            if other.fits(layout):
                gain = now / other.step_seconds(layout) - 1
                found.append(Change(f"schedule {name}", f"tools/launch.py --schedule {name}", gain))
    if anew:
        many = replace(problem, microbatches=2 * problem.microbatches, packs=_twice(problem.packs), lists=None)
        gain = 2 * now / many.step_seconds(layout) - 1
        words = f"{many.microbatches} microbatches an iteration"
        found.append(Change(words, f"tools/pack_data.py --micro-batches {many.microbatches}", gain))
    keeping, bare = _keeping_all(problem), Layout(layout.edges, tuple(() for _ in layout.recompute))
    if keeping is not problem or any((*layout.recompute, *layout.recompute_cheap)):
        needs = max(keeping.stage_peak_bytes(bare)) / GIB
        gain = now / keeping.step_seconds(bare) - 1
        found.append(Change("nothing recomputed", f"needs {needs:.2f} GiB on a rank: --memory-gib {needs:.2f}", gain))
    return sorted((c for c in found if c.gain >= WORTH_TRYING), key=lambda change: -change.gain)


def _keeping_all(problem: LayoutProblem) -> LayoutProblem:
    """The problem, of a tower beside the pipeline with all that it keeps from E to V."""
    beside = problem.beside
    if beside is None or not (beside.tower.again or beside.tower.recompute):
        return problem
    return replace(problem, beside=replace(beside, tower=replace(beside.tower, recompute=(), again=False)))


def _twice(packs: PackSizes | None) -> PackSizes | None:
    if packs is None:
        return None
    twice: dict[str, Any] = {entry.name: getattr(packs, entry.name) for entry in fields(packs)}
    twice |= {name: np.concatenate([a, a], axis=-1) for name, a in twice.items() if a is not None}
    return PackSizes(**twice)
