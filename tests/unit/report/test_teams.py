"""What ranks that run a pack together send each other is a cause of its own, and their packs are marked."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest

from omnibal_ext.costs.corrected import EXCHANGE
from omnibal_ext.costs.profile import PackSizes
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.report.breakdown import _twice, breakdown
from omnibal_ext.report.draw import timeline_svg
from omnibal_ext.report.timeline import packs_of_record, predicted, recorded
from omnibal_ext.report.trace import trace
from omnibal_ext.schedules.placement import Placement
from tests.unit.layout.instances import make_profile
from tests.unit.report.subjects import assert_whole

MICROBATCHES = 4
SENT = np.array([[[7, 0, 3, 0], [7, 2, 0, 0]]])
WIDTHS = np.array([[[4, 1, 2, 1], [4, 2, 1, 2]]])
EACH = 0.013
"""Seconds of a token in a layer, forward."""


def problem_of(schedule: str) -> tuple[LayoutProblem, Layout]:
    """Two replicas, two ranks; some language layers of the second are recomputed, whole or what is cheap of them."""
    profile = make_profile()
    llm = replace(profile.layers["llm"], exchange_seconds=EACH, recompute_seconds=None)
    profile = replace(profile, layers={**profile.layers, "llm": llm}, action_seconds=0.01)
    tokens = np.random.default_rng(0).integers(4, 17, SENT.shape)
    packs = PackSizes(tokens // 4, tokens, tokens**2, SENT, WIDTHS)
    language = [number for number, kind in enumerate(profile.chain) if kind == "llm"]
    layout = Layout((0, language[1], len(profile.chain)), ((), (language[1],)))
    return LayoutProblem(profile, 2, MICROBATCHES, schedule_name=schedule, packs=packs), layout


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_exchange_is_a_cause_of_its_own_and_takes_from_no_other(schedule: str) -> None:
    problem, layout = problem_of(schedule)
    layers = problem.profile.chain.count("llm")
    forwards_and_backwards, again = 2 * layers, 1
    seconds = float(SENT.sum()) * EACH * (forwards_and_backwards + again)
    timeline = predicted(problem, layout)
    shares, whole = breakdown(timeline), timeline.seconds * len(timeline.lanes)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["exchange"] * whole == pytest.approx(seconds)
    assert problem.packs is not None
    alone = predicted(replace(problem, packs=replace(problem.packs, exchanged=None)), layout)
    others, rest = breakdown(alone), alone.seconds * len(alone.lanes)
    assert others["exchange"] == 0
    for cause in ("needed", "recomputation", "executor", "update"):
        assert shares[cause] * whole == pytest.approx(others[cause] * rest), cause
    assert_whole(timeline)
    for lane in timeline.lanes:
        for span in lane.spans:
            sent = SENT[0, lane.data_parallel_rank, span.action.microbatch]
            has = any(piece.part == EXCHANGE for piece in span.pieces)
            assert has == (sent > 0 and span.action.kind != "W"), span


def test_packs_of_several_ranks_are_marked_wherever_they_are_shown() -> None:
    problem, layout = problem_of("1f1b")
    timeline = predicted(problem, layout)
    for lane in timeline.lanes:
        widths = WIDTHS[0, lane.data_parallel_rank]
        assert all(span.width == widths[span.action.microbatch] for span in lane.spans)
    drawing = str(timeline_svg(timeline, timeline.seconds))
    actions = 2 * 2  # forwards and backwards on two ranks
    for width in (2, 4):
        count = int((width == WIDTHS).sum()) * actions
        assert drawing.count(f"; a pack of {width} ranks</title>") == count
    assert drawing.count("class='team'") == int((WIDTHS > 1).sum()) * actions
    assert "a pack of 1" not in drawing
    marked = [event["args"]["ranks"] for event in trace([timeline])["traceEvents"] if "ranks" in event.get("args", {})]
    assert sorted(marked) == sorted(WIDTHS[WIDTHS > 1].tolist() * actions)


def test_twice_the_microbatches_have_all_that_packs_have() -> None:
    problem, _ = problem_of("1f1b")
    assert problem.packs is not None
    found = _twice(problem.packs)
    assert found is not None
    for name in (entry.name for entry in fields(PackSizes) if getattr(found, entry.name) is not None):
        assert np.array_equal(getattr(found, name), np.tile(getattr(problem.packs, name), 2)), name


@pytest.mark.parametrize("columns", [3, 5, 6])
def test_recorded_packs_say_what_was_sent_and_older_ones_nothing(columns: int) -> None:
    """Mel frames are said of packs with sounds alone."""
    packs = [[[1, 10, 60, 4, 2, 500], [2, 8, 64, 0, 1]], [[1, 10, 60, 4, 2], [0, 9, 81, 0, 1]]]
    lanes = [
        {"data_parallel_rank": replica, "rank": 0, "end": 3.0, "held": [], "reads": [],
         "packs": [pack[:columns] for pack in packs[replica]],
         "actions": [["F", m, 0, m, m + 1, [["llm", "forward", 0.75], ["exchange", "forward", 0.25]]] for m in (0, 1)]}
        for replica in (0, 1)
    ]  # fmt: skip
    record = json.loads(json.dumps({"iteration": 4, "lanes": lanes}))
    timeline = recorded(record, Placement.interleaved(1))
    wide = columns > 3
    assert [[span.width for span in lane.spans] for lane in timeline.lanes] == [[1 + wide, 1]] * 2
    assert breakdown(timeline)["exchange"] == pytest.approx(4 * 0.25 / 6)
    found = packs_of_record(record)
    assert found.tokens.tolist() == [[[10, 8], [10, 9]]]
    assert found.of("frames").tolist() == [[[500 * (columns == 6), 0], [0, 0]]]
    assert (found.exchanged is None, found.widths is None) == (not wide, not wide)
    if found.exchanged is not None and found.widths is not None:
        assert (found.exchanged.tolist(), found.widths.tolist()) == ([[[4, 0], [4, 0]]], [[[2, 1], [2, 1]]])
