"""A recorded iteration as it would have been without waits for packs and for the host.

as it was    rank 0  reads.....F0 F1 B0 B1      without  rank 0  F0 F1 B0 B1
             rank 1            F0 B0 F1 B1               rank 1     F0 B0 F1 B1
"""

from collections.abc import Iterator
from dataclasses import replace

from omnibal_ext.report.timeline import Lane, Span, Timeline
from omnibal_ext.schedules.actions import givers


def on_time(timeline: Timeline) -> Timeline:
    """The same actions with unchanged durations, started as early as their inputs allow.

    1. An action that receives a tensor keeps its recorded delay after the tensor was sent and its rank was free, minus
       the rank's wait for a pack.
    2. Any other action starts when the one before it ends: it can only have waited for a pack or for its host.
    3. The update keeps its recorded delay after the last action of all ranks.
    """
    made = {(*_place(lane), span.action): span.end for lane in timeline.lanes for span in lane.spans}
    moved_ends = dict(made)
    spans: dict[tuple[int, int], list[Span]] = {_place(lane): [] for lane in timeline.lanes}
    for lane, before, span in sorted(_steps(timeline.lanes), key=lambda step: step[2].start):
        place = _place(lane)
        start = spans[place][-1].end if spans[place] else 0.0
        given = givers(span.action, lane.rank, timeline.placement, timeline.beside)
        tensors = [(lane.data_parallel_rank, *one) for one in given if one[0] != lane.rank]
        if tensors:
            ready = before + _read(lane, before, span.start)
            late = span.start - max(ready, *(made[tensor] for tensor in tensors))
            start = max(start, *(moved_ends[tensor] for tensor in tensors)) + late
        moved = replace(span, start=start, end=start + span.end - span.start)
        moved_ends[*place, span.action] = moved.end
        spans[place].append(moved)
    lanes = [replace(lane, spans=tuple(spans[_place(lane)]), reads=()) for lane in timeline.lanes]
    earlier = max(lane.last_end for lane in timeline.lanes) - max(lane.last_end for lane in lanes)
    return replace(timeline, lanes=tuple(_earlier(lane, earlier) for lane in lanes))


def _earlier(lane: Lane, seconds: float) -> Lane:
    """The lane with its update so many seconds earlier, but not before its last action."""
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
    """Seconds between two moments in which the lane waits for packs."""
    return sum(max(0.0, min(end, until) - max(start, since)) for since, until in lane.reads)


def _place(lane: Lane) -> tuple[int, int]:
    return lane.data_parallel_rank, lane.rank
