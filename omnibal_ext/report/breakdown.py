"""The time of an iteration by cause, what limits it, and what changes are predicted to gain.

All ranks' time (lanes x length of the iteration) is divided by cause:

    needed             forwards and backwards of the layers, once
    padding            the same of tokens that fill up a batch
    recomputation      repeated forwards
    executor           time of an action outside its layers
    exchange           ranks that share a pack exchange tensors, and wait for each other
    late data or host  the iteration takes longer because a rank waits for its packs, or for its own host
    uneven stages      ranks wait because the slowest rank works longer than they do
    fill and drain     ranks wait for their first microbatch, after their last, and for tensors between
    update             gradients are reduced and weights updated
    other replicas     data-parallel ranks wait for the slowest of them

A late pack costs nothing where its rank would have waited for others anyway. So the iteration is simulated without late
packs (`on_time`): "late data or host" is the time saved, and the other causes divide the rest.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from omnibal_ext.costs.corrected import EXCHANGE, OTHER
from omnibal_ext.costs.profile import PackSizes
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.report.timeline import Lane, Span, Timeline
from omnibal_ext.schedules.actions import givers
from omnibal_ext.units import GIB

NEEDED, PADDING, RECOMPUTED, EXECUTOR = "needed", "padding", "recomputation", "executor"
LATE = "late data or host"
UNEVEN, FILL, UPDATE, REPLICAS = "uneven stages", "fill and drain", "update", "other replicas"
CAUSES = (NEEDED, PADDING, RECOMPUTED, EXECUTOR, EXCHANGE, LATE, UNEVEN, FILL, UPDATE, REPLICAS)
WORTH_TRYING = 0.01
"""Least predicted gain of a change that is suggested."""


def breakdown(timeline: Timeline) -> dict[str, float]:
    """Return fractions of all ranks' time by cause, in the order of `CAUSES`; their sum is 1."""
    found, lanes_seconds = dict.fromkeys(CAUSES, 0.0), timeline.seconds * len(timeline.lanes)
    causes = {OTHER: EXECUTOR, EXCHANGE: EXCHANGE}
    for (part, phase), seconds in timeline.totals().items():
        found[causes.get(part, RECOMPUTED if phase == "recompute" else NEEDED)] += seconds
    found[PADDING] = found[NEEDED] * timeline.padding
    found[NEEDED] -= found[PADDING]
    prompt = on_time(timeline)
    found[LATE] = late_seconds(timeline) * len(timeline.lanes)
    for lanes in replicas(prompt).values():
        end, slowest = max(lane.end for lane in lanes), max(lane.work_seconds for lane in lanes)
        last = max(lane.last_end for lane in lanes)
        for lane in lanes:
            done = min(last, lane.update_at)  # a rank that does not wait for its replica may update earlier
            uneven = slowest - lane.work_seconds
            found[UNEVEN] += uneven
            found[FILL] += done - lane.work_seconds - uneven + end - lane.end
            found[UPDATE] += lane.end - lane.update_at
            found[REPLICAS] += prompt.seconds - end + lane.update_at - done
    return {cause: seconds / lanes_seconds for cause, seconds in found.items()}


def late_seconds(timeline: Timeline) -> float:
    """Return the seconds by which the iteration would have been shorter without waits for data and host."""
    return max(0.0, timeline.seconds - on_time(timeline).seconds)


def on_time(timeline: Timeline) -> Timeline:
    """Return the timeline as if no pack or host were late: the same actions, as long, started as early as inputs allow.

    1. An action that receives a tensor keeps its recorded delay after the tensor was sent and its rank was free, minus
       the rank's wait for a pack.
    2. Any other action starts when the one before it ends: it can only have waited for a pack or for its host.
    3. The update keeps its recorded delay after the last action of all ranks.
    """
    made = {(*_key(lane), span.action): span.end for lane in timeline.lanes for span in lane.spans}
    moved_ends = dict(made)
    spans: dict[tuple[int, int], list[Span]] = {_key(lane): [] for lane in timeline.lanes}
    for lane, before, span in sorted(_steps(timeline.lanes), key=lambda step: step[2].start):
        key = _key(lane)
        start = spans[key][-1].end if spans[key] else 0.0
        given = givers(span.action, lane.rank, timeline.placement, timeline.beside)
        tensors = [(lane.data_parallel_rank, *one) for one in given if one[0] != lane.rank]
        if tensors:
            ready = before + _read(lane, before, span.start)
            late = span.start - max(ready, *(made[tensor] for tensor in tensors))
            start = max(start, *(moved_ends[tensor] for tensor in tensors)) + late
        moved = replace(span, start=start, end=start + span.end - span.start)
        moved_ends[*key, span.action] = moved.end
        spans[key].append(moved)
    lanes = [replace(lane, spans=tuple(spans[_key(lane)]), reads=()) for lane in timeline.lanes]
    earlier = max(lane.last_end for lane in timeline.lanes) - max(lane.last_end for lane in lanes)
    return replace(timeline, lanes=tuple(_earlier(lane, earlier) for lane in lanes))


def _earlier(lane: Lane, seconds: float) -> Lane:
    """Return the lane with its update so many seconds earlier, but not before its last action."""
    barrier = None if lane.barrier is None else max(lane.last_end, lane.barrier - seconds)
    return replace(lane, end=max(lane.last_end, lane.end - seconds), barrier=barrier)


def _steps(lanes: tuple[Lane, ...]) -> Iterator[tuple[Lane, float, Span]]:
    """Yield every action with its lane, and when the previous action ended."""
    for lane in lanes:
        before = 0.0
        for span in lane.spans:
            yield lane, before, span
            before = span.end


def _read(lane: Lane, start: float, end: float) -> float:
    """Return the seconds between two moments in which the lane waits for packs."""
    return sum(max(0.0, min(end, until) - max(start, since)) for since, until in lane.reads)


def _key(lane: Lane) -> tuple[int, int]:
    return lane.data_parallel_rank, lane.rank


def replicas(timeline: Timeline) -> dict[int, list[Lane]]:
    """Group the timeline's lanes by data-parallel rank."""
    found: defaultdict[int, list[Lane]] = defaultdict(list)
    for lane in timeline.lanes:
        found[lane.data_parallel_rank].append(lane)
    return dict(found)


@dataclass(frozen=True, slots=True)
class Limit:
    """The slowest rank of the pipeline, and the most expensive of `CAUSES`, with its fraction of the time."""

    lane: Lane
    stages: tuple[int, ...]
    others: float
    """Mean seconds of work of the other ranks of its pipeline."""
    cause: str
    share: float

    @property
    def more(self) -> float:
        """How much longer the rank works than the others on average (0.1: 10%)."""
        return self.lane.work_seconds / self.others - 1 if self.others else 0.0


def limit_of(timeline: Timeline) -> Limit:
    """Return the rank that works longest in the replica that ends last, and the cause besides work that costs most."""
    last = max(replicas(timeline).values(), key=lambda lanes: max(lane.end for lane in lanes))
    slowest = max(last, key=lambda lane: lane.work_seconds)
    others = [lane.work_seconds for lane in last if lane is not slowest]
    shares = breakdown(timeline)
    cause = max(CAUSES[1:], key=lambda name: shares[name])
    stages = tuple(sorted({span.stage for span in slowest.spans}))
    return Limit(slowest, stages, float(np.mean(others)) if others else 0.0, cause, shares[cause])


@dataclass(frozen=True, slots=True)
class Change:
    """A suggestion: what to change, how, and the predicted gain in samples per second (0.1: 10% more)."""

    what: str
    how: str
    gain: float


def faster_data(timeline: Timeline) -> Change | None:
    """Return the gain if a recorded iteration did not wait for data or host; None: less than `WORTH_TRYING`."""
    gain = timeline.seconds / (timeline.seconds - late_seconds(timeline)) - 1
    how = "omnibal launch -- --num-workers N, or smaller images"
    return Change("data and host in time", how, gain) if gain >= WORTH_TRYING else None


def level_ranks(timeline: Timeline) -> Change | None:
    """Return the gain if no data-parallel rank waited for another; None: less than `WORTH_TRYING`."""
    gain = 1 / (1 - breakdown(timeline)[REPLICAS]) - 1
    how = "balanced packs for these ranks (omnibal pack, omnibal level), or more --micro-batches"
    return Change("data-parallel ranks level", how, gain) if gain >= WORTH_TRYING else None


def changes(problem: LayoutProblem, layout: Layout) -> list[Change]:
    """Simulate other schedules, twice the microbatches and no recomputation; return what gains, the best first.

    With a replicated tower only the last: the others need a new plan.
    """
    now, found = problem.step_seconds(layout), []
    can_reschedule = problem.ranks > 1 and problem.beside is None
    for name in ("1f1b", "zb_h1"):
        if name != problem.schedule_name and can_reschedule:
            other = replace(problem, schedule_name=name, lists=None)
            if other.fits(layout):
                gain = now / other.step_seconds(layout) - 1
                found.append(Change(f"schedule {name}", f"omnibal launch --schedule {name}", gain))
    if can_reschedule:
        many = replace(problem, microbatches=2 * problem.microbatches, packs=_twice(problem.packs), lists=None)
        gain = 2 * now / many.step_seconds(layout) - 1
        words = f"{many.microbatches} microbatches an iteration"
        found.append(Change(words, f"omnibal pack --micro-batches {many.microbatches}", gain))
    keeping, bare = _keeping_all(problem), Layout(layout.edges, tuple(() for _ in layout.recompute))
    if keeping is not problem or any((*layout.recompute, *layout.recompute_cheap)):
        needs = max(keeping.stage_peak_bytes(bare)) / GIB
        gain = now / keeping.step_seconds(bare) - 1
        found.append(Change("nothing recomputed", f"needs {needs:.2f} GiB on a rank: --memory-gib {needs:.2f}", gain))
    return sorted((c for c in found if c.gain >= WORTH_TRYING), key=lambda change: -change.gain)


def _keeping_all(problem: LayoutProblem) -> LayoutProblem:
    """Return the problem without recomputation in a replicated tower."""
    beside = problem.beside
    if beside is None or not beside.tower.recompute:
        return problem
    return replace(problem, beside=replace(beside, tower=replace(beside.tower, recompute=())))


def _twice(packs: PackSizes | None) -> PackSizes | None:
    if packs is None:
        return None
    once: dict[str, Any] = {entry.name: getattr(packs, entry.name) for entry in fields(packs)}
    more = {size: np.concatenate([a, a], axis=-1) for size, a in once.pop("more").items()}
    once |= {name: np.concatenate([a, a], axis=-1) for name, a in once.items() if a is not None}
    return PackSizes(**once, more=more)
