"""Timelines: pieces make up their actions, shares their whole; the bubble is that of closed forms; the trace nests.
What ranks that run a pack together send each other is a cause of its own, and their packs are marked.
"""

import json
import math
from collections import Counter
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.costs.corrected import EXCHANGE
from omnibal_ext.costs.profile import PackSizes
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import find_layouts, find_plan, make_plan
from omnibal_ext.plan import Plan
from omnibal_ext.report.breakdown import CAUSES, EXECUTOR, FILL, NEEDED, RECOMPUTED, _twice, breakdown
from omnibal_ext.report.draw import timeline_svg
from omnibal_ext.report.timeline import Timeline, layout_of, packs_of_record, predicted, problem_of, recorded, waits
from omnibal_ext.report.trace import trace
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.schedule import SCHEDULE_NAMES, V_SHAPED
from tests.long import short
from tests.unit.layout.instances import make_profile, random_problem
from tests.unit.report.subjects import assert_whole

SEEDS = range(12)


def timeline_of(seed: int, **changes: object) -> tuple[LayoutProblem, Layout, Timeline]:
    problem = random_problem(seed, memory_bytes=float("inf"), **changes)
    problem = replace(problem, profile=replace(problem.profile, action_seconds=0.01, iteration_seconds=0.2))
    layout = find_layouts(problem, "layers", recompute="full" if seed % 3 == 0 else "fewest")[0].layout
    return problem, layout, predicted(problem, layout)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("seed", SEEDS)
def test_pieces_make_up_actions_and_shares_the_whole(seed: int, schedule: str) -> None:
    problem, layout, timeline = timeline_of(seed, schedule_name=schedule)
    assert_whole(timeline)
    for lane in timeline.lanes:
        assert lane.work_seconds + sum(end - start for start, end in waits(lane)) == pytest.approx(lane.last_end)
    shares = breakdown(timeline)
    assert tuple(shares) == CAUSES
    assert sum(shares.values()) == pytest.approx(1.0)
    again = any(layout.recompute)
    assert (shares[RECOMPUTED] > 0) == again
    assert shares[EXECUTOR] > 0
    if problem.packs is None or problem.packs.tiles.shape[0] == 1:  # the plan's step is the mean over iterations
        assert timeline.seconds == pytest.approx(problem.step_seconds(layout))
        assert shares[NEEDED] == pytest.approx(problem.ideal_seconds() / timeline.seconds)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("microbatches", [1, 4, 7])
def test_equal_stages_lose_the_bubble_of_1f1b_and_nothing_else(ranks: int, microbatches: int) -> None:
    profile = make_profile(vit=ranks, llm=ranks)
    zero = replace(profile.layers["head"], forward_seconds=1e-12, backward_seconds=1e-12)
    layers = {kind: cost if kind == "llm" else zero for kind, cost in profile.layers.items()}
    problem = LayoutProblem(replace(profile, layers=layers), ranks, microbatches)
    first = profile.chain.index("llm")
    edges = (0, *range(first + 1, first + ranks), len(profile.chain))
    shares = breakdown(predicted(problem, Layout(edges, ((),) * ranks)))
    assert shares[FILL] == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert shares[NEEDED] + shares[FILL] == pytest.approx(1.0)


def test_a_tensor_crosses_once_each_way_between_neighbours() -> None:
    problem, _, timeline = timeline_of(1, ranks=3, microbatches=4, chunks=1)
    replicas = problem.cases[1]
    crossings = timeline.transfers()
    assert len(crossings) == 2 * (3 - 1) * 4 * replicas
    for made, source, taken, target in crossings:
        assert taken.start >= made.end - 1e-9
        assert source.data_parallel_rank == target.data_parallel_rank
        assert target.rank - source.rank == (1 if made.action.kind == "F" else -1)


def test_on_a_v_nothing_crosses_at_the_turn() -> None:
    problem, _, timeline = timeline_of(1, ranks=2, microbatches=4, chunks=2, schedule_name="zb_v")
    crossings = timeline.transfers()
    assert len(crossings) == 2 * 2 * 4 * problem.cases[1]  # two of three borders, there and back
    for made, source, taken, target in crossings:
        assert {made.stage, taken.stage} in ({0, 1}, {2, 3})
        assert (source.rank == 1) == (made.stage in (0, 3))
        assert source.rank != target.rank


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("seed", short([1, 2, 5], [1]))
def test_a_report_plays_what_its_plan_was_judged_by(name: str, seed: int, tmp_path: Path) -> None:
    """Cuts, both ways to recompute, memory, chunks, schedule and lists: all that plan.json has of it. Lists that were
    built for the plan give other times than those that the schedule's name stands for."""
    chunks = 2 if name in V_SHAPED or name == "interleaved" else 1
    problem = random_problem(seed, schedule_name=name, ranks=2, microbatches=4, chunks=chunks, memory_bytes=math.inf)
    problem = replace(problem, memory_bytes=1.1 * max(problem.stage_peak_bytes(even_cut(problem))))
    problem, candidates = find_plan(problem, "joint", seconds=0.1)
    layout = candidates[0].layout
    make_plan(problem, candidates[:1], "joint").save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    found = problem_of(read, problem.profile, problem.packs)
    assert layout_of(read) == layout
    assert {name: (value, getattr(found, name)) for name, value in vars(problem).items()
            if name in JUDGED and getattr(found, name) != value} == {}  # fmt: skip
    assert found.memory_bytes == pytest.approx(problem.memory_bytes)
    assert found.step_seconds(layout_of(read)) == pytest.approx(read.predicted["step_seconds"], rel=1e-12)
    assert found.stage_peak_bytes(layout_of(read)) == pytest.approx(read.predicted["stage_peak_bytes"], rel=1e-12)
    if read.lists:
        assert replace(found, lists=None).step_seconds(layout) != pytest.approx(found.step_seconds(layout))


JUDGED = ("ranks", "microbatches", "chunks", "schedule_name", "profile", "packs", "lists")


def even_cut(problem: LayoutProblem) -> Layout:
    stages, layers = problem.ranks * problem.chunks, len(problem.profile.chain)
    return Layout(tuple(layers * stage // stages for stage in range(stages + 1)), ((),) * stages)


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_the_trace_has_every_action_once_with_its_pieces_inside(seed: int) -> None:
    _, _, timeline = timeline_of(seed)
    events = json.loads(json.dumps(trace([timeline, timeline])))["traceEvents"]
    assert {event["ph"] for event in events} <= {"X", "M", "s", "f", "C"}
    slices = [event for event in events if event["ph"] == "X"]
    assert all(type(event[key]) is int for event in slices for key in ("ts", "dur")), "floats cross by their last bit"
    actions = [event for event in slices if event["cat"] == "action"]
    wanted = Counter(
        (process, thread, f"{span.action.kind}{span.action.microbatch}", span.stage)
        for process in (0, 1) for thread, lane in enumerate(timeline.lanes) for span in lane.spans
    )  # fmt: skip
    assert Counter((e["pid"], e["tid"], e["name"], e["args"]["stage"]) for e in actions) == wanted
    for a, b in pairwise(sorted(actions, key=lambda e: (e["pid"], e["tid"], e["ts"]))):
        assert (a["pid"], a["tid"]) != (b["pid"], b["tid"]) or a["ts"] + a["dur"] <= b["ts"]
    pieces = [event for event in slices if event["cat"] not in ("action", "step", "read")]
    assert pieces
    assert all(len(around(actions, piece)) == 1 for piece in pieces)
    arrows = Counter((event["id"], event["ph"]) for event in events if event["ph"] in "sf")
    assert set(arrows.values()) <= {1}
    assert len({number for number, _ in arrows}) * 2 == len(arrows)
    ends: dict[tuple[int, str], tuple[str, int]] = {}
    for event in (event for event in events if event["ph"] in "sf"):
        (met,) = around(actions, {**event, "dur": 1})
        ends[event["id"], event["ph"]] = met["name"], met["args"]["stage"]
    for number in {number for number, _ in ends}:
        (made, stage), (taken, next_stage) = ends[number, "s"], ends[number, "f"]
        assert made == taken
        assert next_stage - stage == (1 if made.startswith("F") else -1)
    work = sum(event["dur"] for event in pieces if event["pid"] == 0) / 1e6
    assert work == pytest.approx(sum(lane.work_seconds for lane in timeline.lanes), abs=1e-6 * len(pieces))


def around(actions: list[dict], event: dict) -> list[dict]:
    """Actions of an event's thread in which it lies."""
    own = [action for action in actions if (action["pid"], action["tid"]) == (event["pid"], event["tid"])]
    end = event["ts"] + event["dur"]
    return [action for action in own if action["ts"] <= event["ts"] and end <= action["ts"] + action["dur"]]


MICROBATCHES = 4
SENT = np.array([[[7, 0, 3, 0], [7, 2, 0, 0]]])
WIDTHS = np.array([[[4, 1, 2, 1], [4, 2, 1, 2]]])
EACH = 0.013
"""Seconds of a token in a layer, forward."""


def team_problem(schedule: str) -> tuple[LayoutProblem, Layout]:
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
    problem, layout = team_problem(schedule)
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
    problem, layout = team_problem("1f1b")
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
    problem, _ = team_problem("1f1b")
    assert problem.packs is not None
    found = _twice(problem.packs)
    assert found is not None
    pairs = {
        entry.name: (getattr(found, entry.name), getattr(problem.packs, entry.name)) for entry in fields(PackSizes)
    }
    heard = pairs.pop("more")
    for name, (twice, once) in pairs.items():
        assert once is None or np.array_equal(twice, np.tile(once, 2)), name
    assert heard == ({}, {})
    more = _twice(replace(problem.packs, more={"frames": problem.packs.tokens}))
    assert more is not None
    assert np.array_equal(more.of("frames"), np.tile(problem.packs.tokens, 2))


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
