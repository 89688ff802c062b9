"""Timelines in Chrome's Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Timelines are processes, lanes are threads; actions enclose their parts, arrows are transfers, counters bytes. Times are
integer microseconds: Perfetto drops slices that end after their enclosing slice, even by a rounding error.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from omnibal_ext.report.timeline import Lane, Timeline


def trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return timelines in Chrome's Trace Event Format, to be written as JSON; times in microseconds."""
    events = [event for number, timeline in enumerate(timelines) for event in _events(timeline, number)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(timeline: Timeline, process: int) -> Iterator[dict[str, Any]]:
    yield _named("process_name", process, 0, timeline.name)
    for thread, lane in enumerate(timeline.lanes):
        yield _named("thread_name", process, thread, f"replica {lane.data_parallel_rank}, rank {lane.rank}")
        yield from _lane_events(lane, process, thread)
    threads = {id(lane): thread for thread, lane in enumerate(timeline.lanes)}
    for number, (made, source, taken, target) in enumerate(timeline.transfers()):
        flow = {"cat": "transfer", "name": "transfer", "id": process * 10**6 + number, "pid": process}
        # Perfetto binds an arrow to the slices around its ends: start it just before the sending slice ends.
        inside = max(_micro(made.start), _micro(made.end) - 1)
        yield {**flow, "ph": "s", "tid": threads[id(source)], "ts": inside}
        yield {**flow, "ph": "f", "bp": "e", "tid": threads[id(target)], "ts": _micro(taken.start)}


def _lane_events(lane: Lane, process: int, thread: int) -> Iterator[dict[str, Any]]:
    for span in lane.spans:
        name = f"{span.action.kind}{span.action.microbatch}"
        more = {"stage": span.stage, "microbatch": span.action.microbatch, "chunk": span.action.chunk}
        more |= {"ranks": span.width} if span.width > 1 else {}
        yield _slice(name, "action", span.start, span.end, process, thread, more)
        at = span.start
        for piece in span.pieces:
            end = min(at + piece.seconds, span.end)
            yield _slice(f"{piece.part} {piece.phase}", piece.phase, at, end, process, thread, {})
            at = end
    for start, end in lane.reads:
        yield _slice("waits for a pack", "read", start, end, process, thread, {})
    if lane.end > lane.update_at:
        yield _slice("gradients and weights", "step", lane.update_at, lane.end, process, thread, {})
    for seconds, held in lane.held:
        name = f"bytes of replica {lane.data_parallel_rank}, rank {lane.rank}"
        yield {"ph": "C", "name": name, "pid": process, "ts": _micro(seconds), "args": {"held": held}}


def _slice(
    name: str, category: str, start: float, end: float, process: int, thread: int, more: dict[str, Any]
) -> dict[str, Any]:
    where = {"pid": process, "tid": thread, "ts": _micro(start), "dur": _micro(end) - _micro(start)}
    return {"ph": "X", "name": name, "cat": category, **where, "args": more}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)
