"""What reports say in numbers, reckoned once more from timelines, packs and lines of metrics."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.demo import compare
from examples.demo.compare import summary
from examples.demo.evaluate import share_right
from examples.demo.take_turns import Turn
from omnibal_ext.costs.profile import PackSizes
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import find_layouts
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.plan import Plan
from omnibal_ext.report.against_random import contributions, random_index
from omnibal_ext.report.breakdown import (
    CAUSES,
    WORTH_TRYING,
    breakdown,
    changes,
    faster_data,
    level_ranks,
    limit_of,
    on_time,
)
from omnibal_ext.report.packing import PackingView
from omnibal_ext.report.subject import Subject
from omnibal_ext.report.timeline import Lane, Span, SpanPart, Timeline, recorded
from omnibal_ext.schedules.actions import Action, Schedule, givers
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import compile_schedule
from omnibal_ext.schedules.schedule import build_schedule, placement_of
from omnibal_ext.sizes import Sizes
from tests.unit.layout.instances import make_profile, random_problem
from tests.unit.report.subjects import write_lines

COSTS = PackCosts({"vision": {"tiles": 3.0, "pack": 2.0}, "language": {"tokens": 0.1, "attention": 1e-4}})


def lane(replica: int, rank: int, work: tuple[tuple[str, str, str, float, float], ...], end: float) -> Lane:
    """Spans of one piece each: action, part, phase, start and end."""
    spans = [
        Span(Action.of_word(word), rank, start, stop, (SpanPart(part, phase, stop - start),))  # type: ignore[arg-type]
        for word, part, phase, start, stop in work
    ]
    return Lane(replica, rank, tuple(spans), end)


def by_hand() -> Timeline:
    """Two replicas of two ranks. Replica 0 ends at 13, its ranks work 8 and 5; replica 1 ends at 10, its 7 and 4."""
    lanes = (
        lane(0, 0, (("F0.0", "vit", "forward", 0, 3), ("F1.0", "vit", "recompute", 3, 4),
                    ("F2.0", "other", "forward", 4, 5), ("B0.0", "vit", "backward", 9, 12)), 13),
        lane(0, 1, (("F0.0", "llm", "forward", 4, 6), ("B0.0", "llm", "backward", 6, 9)), 12),
        lane(1, 0, (("F0.0", "vit", "forward", 0, 3), ("F1.0", "vit", "forward", 3, 7)), 10),
        lane(1, 1, (("F0.0", "llm", "forward", 5, 9),), 9.5),
    )  # fmt: skip
    return Timeline("by hand", lanes, Placement.interleaved(2))


def test_the_time_of_all_ranks_is_divided_by_its_causes() -> None:
    whole = 4 * 13.0
    expected = {
        "needed": 3 + 3 + 5 + 7 + 4, "padding": 0, "recomputation": 1, "executor": 1, "exchange": 0,
        "late data or host": 0,
        "uneven stages": (8 - 5) + (7 - 4), "update": 1 + 3 + 3 + 0.5, "other replicas": 2 * (13 - 10),
        "fill and drain": (12 - 8) + (9 - 5 - 3 + 13 - 12) + (7 - 7) + (9 - 4 - 3 + 10 - 9.5),
    }  # fmt: skip
    assert sum(expected.values()) == whole
    assert breakdown(by_hand()) == pytest.approx({cause: expected[cause] / whole for cause in CAUSES})


def test_work_on_padding_is_lost_and_not_needed() -> None:
    """Else batches with more padding would show more needed work."""
    before, shares = breakdown(by_hand()), breakdown(replace(by_hand(), padding=0.25))
    assert shares["needed"] == pytest.approx(0.75 * before["needed"])
    assert shares["padding"] == pytest.approx(0.25 * before["needed"])
    assert {name: shares[name] for name in CAUSES[2:]} == {name: before[name] for name in CAUSES[2:]}


def test_padding_is_the_mean_of_a_runs_intervals_by_their_seconds(tmp_path: Path) -> None:
    lines = [{"iteration": n, "loss": 1.0, "padding": share, "seconds": s} for n, share, s in ((1, 0.5, 1), (2, 0, 3))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    nothing: Any = None
    assert Subject("run", nothing, nothing, metrics=tmp_path / "metrics.jsonl").padding == 0.125
    assert Subject("plan", nothing, nothing).padding == 0


def test_ranks_that_wait_for_others_are_told_what_levels_them() -> None:
    change = level_ranks(by_hand())
    assert change is not None
    assert change.gain == pytest.approx(52 / (52 - 6) - 1)
    alone = replace(by_hand(), lanes=by_hand().lanes[:2])
    assert level_ranks(alone) is None


def test_ranks_that_meet_in_the_update_have_waited_for_each_other_before_it() -> None:
    """Replica 0 works 8 and 5 until 12 and 9, replica 1 works 7 and 4 until 7 and 9; all begin the update at 12."""

    def recorded_with(*ends: float) -> Timeline:
        lanes = [
            {"data_parallel_rank": lane.data_parallel_rank, "rank": lane.rank, "end": end, "held": [], "packs": [],
             "reads": [], "actions": [[s.action.kind, s.action.microbatch, 0, s.start, s.end,
                                       [[p.part, p.phase, p.seconds] for p in s.pieces]] for s in lane.spans]}
            for lane, end in zip(by_hand().lanes, ends, strict=True)
        ]  # fmt: skip
        return recorded({"iteration": 5, "lanes": lanes}, Placement.interleaved(2))

    shares, whole = breakdown(recorded_with(13, 13, 13, 13)), 4 * 13.0
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["update"] * whole == pytest.approx(4 * 1)
    assert shares["other replicas"] * whole == pytest.approx(2 * (12 - 9))
    assert shares["uneven stages"] * whole == pytest.approx(3 + 3)
    assert shares["fill and drain"] * whole == pytest.approx((12 - 8) + (12 - 5 - 3) + (9 - 7) + (9 - 4 - 3))
    assert {lane.update_at for lane in recorded_with(12.5, 13, 13, 13).lanes} == {12.0}
    early = recorded_with(13, 13, 13, 9.5)
    assert [lane.update_at for lane in early.lanes] == [12, 9, 7, 9]  # one has not waited: each begins alone


def late(timeline: Timeline, seconds: float) -> Timeline:
    """All of it so much later, for want of the first packs."""
    lanes = []
    for lane in timeline.lanes:
        spans = tuple(replace(span, start=span.start + seconds, end=span.end + seconds) for span in lane.spans)
        reads = ((0.0, seconds),) if lane.rank == 0 else ()
        lanes.append(replace(lane, spans=spans, end=lane.end + seconds, reads=reads))
    return replace(timeline, lanes=tuple(lanes))


def test_what_late_packs_cost_is_no_other_cause_s() -> None:
    shares, before, whole = breakdown(late(by_hand(), 2.0)), breakdown(by_hand()), 13 + 2.0
    assert shares["late data or host"] == pytest.approx(2 / whole)
    rest = {cause: share * 13 / whole for cause, share in before.items() if cause != "late data or host"}
    assert {cause: shares[cause] for cause in rest} == pytest.approx(rest)
    change = faster_data(late(by_hand(), 2.0))
    assert change is not None
    assert change.gain == pytest.approx(whole / 13 - 1)
    assert faster_data(by_hand()) is None


def test_a_rank_without_a_pipeline_waits_for_its_host_and_never_for_a_pipeline() -> None:
    """Nothing was recorded of its gaps but that they are there; the update moves with the last of all ranks."""
    first = lane(0, 0, (("F0.0", "vit", "forward", 4, 5), ("B0.0", "vit", "backward", 6, 8)), 10)
    other = lane(1, 0, (("F0.0", "vit", "forward", 0, 1), ("B0.0", "vit", "backward", 1, 3)), 10)
    timeline = Timeline("late", (first, other), Placement.interleaved(1))
    shares = breakdown(timeline)
    assert shares["late data or host"] == pytest.approx(5 / 10)
    assert shares["needed"] == pytest.approx(6 / 20)
    assert shares["update"] == pytest.approx(2 * 2 / 20)
    assert shares["fill and drain"] == shares["uneven stages"] == shares["other replicas"] == 0


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_h1", "zb_v"])
@pytest.mark.parametrize("seed", range(4))
def test_without_its_late_packs_an_iteration_is_as_if_there_were_none(name: str, seed: int) -> None:
    """Played once with packs that come late before some forwards, and once without: waits that hide cost nothing."""
    random, chunks = np.random.default_rng(seed), 2 if name == "zb_v" else 1
    schedule = build_schedule(name, 3, 6, chunks)
    placement = placement_of(name, 3, chunks)
    seconds = {(r, a): float(random.uniform(1, 4)) for r, actions in enumerate(schedule) for a in actions}
    slow = {key: float(random.choice([0, 0, 5])) for key in seconds if key[1].kind == "F"}
    for waits in ({}, slow):
        played = play_late(schedule, placement, seconds, waits)
        found = on_time(played)
        wanted = play_late(schedule, placement, seconds, {})
        for one, other in zip(found.lanes, wanted.lanes, strict=True):
            assert [span.start for span in one.spans] == pytest.approx([span.start for span in other.spans])
            assert one.end == pytest.approx(other.end)
            assert not one.reads
    assert 0 < played.seconds - wanted.seconds < sum(slow.values())


def play_late(
    schedule: Schedule, placement: Placement, seconds: Mapping[tuple[int, Action], float],
    waits: Mapping[tuple[int, Action], float],
) -> Timeline:  # fmt: skip
    """Every action as early as its rank, its pack and what it takes allow; an update of 2 s that all ranks begin as
    one."""
    ends: dict[tuple[int, Action], float] = {}
    spans: list[list[Span]] = [[] for _ in schedule]
    reads: list[list[tuple[float, float]]] = [[] for _ in schedule]
    for rank, action in compile_schedule(schedule, 6, placement).listed:
        before = spans[rank][-1].end if spans[rank] else 0.0
        ready = before + waits.get((rank, action), 0.0)
        reads[rank] += [(before, ready)] * (ready > before)
        start = max([ready, *(ends[needed] for needed in givers(action, rank, placement))])
        ends[rank, action] = start + seconds[rank, action]
        spans[rank].append(Span(action, 0, start, ends[rank, action], ()))
    end = max(ends.values()) + 2
    lanes = [Lane(0, rank, tuple(found), end, (), tuple(reads[rank])) for rank, found in enumerate(spans)]
    return Timeline("played", tuple(lanes), placement)


def test_the_limit_is_the_rank_that_works_longest_in_the_replica_that_ends_last() -> None:
    found = limit_of(by_hand())
    assert (found.lane.data_parallel_rank, found.lane.rank, found.stages) == (0, 0, (0,))
    assert (found.others, found.more) == (5.0, pytest.approx(8 / 5 - 1))
    assert found.cause == "fill and drain"
    assert found.share == pytest.approx((4 + 2 + 0 + 2.5) / 52)
    assert by_hand().seconds == 13
    assert [lane.work_seconds for lane in by_hand().lanes] == [8, 5, 7, 4]
    assert by_hand().totals()["vit", "forward"] == 10


@pytest.mark.parametrize("seed", range(6))
def test_what_to_try_gives_what_the_simulator_says(seed: int) -> None:
    problem = random_problem(seed, ranks=2, microbatches=4, chunks=1, memory_bytes=float("inf"))
    edges = find_layouts(problem, "profile")[0].layout.edges
    layout = Layout(edges, (tuple(i for i in range(*edges[:2]) if problem.profile.chain[i] == "vit"), ()))
    found, now = {change.what: change for change in changes(problem, layout)}, problem.step_seconds(layout)
    bare = Layout(edges, ((), ()))
    packs = problem.packs
    twice = packs and type(packs)(*(np.concatenate([a, a], -1) for a in (packs.tiles, packs.tokens, packs.squares)))
    gains = {
        "schedule zb_h1": now / replace(problem, schedule_name="zb_h1").step_seconds(layout) - 1,
        "8 microbatches an iteration": 2 * now / replace(problem, microbatches=8, packs=twice).step_seconds(layout) - 1,
        "nothing recomputed": now / problem.step_seconds(bare) - 1,
    }
    worth = {what: gain for what, gain in gains.items() if gain >= WORTH_TRYING}
    if not layout.recompute[0]:
        worth.pop("nothing recomputed", None)
    assert {what: change.gain for what, change in found.items()} == pytest.approx(worth)
    assert [change.gain for change in changes(problem, layout)] == sorted(worth.values(), reverse=True)


@pytest.fixture(scope="module")
def sizes() -> Sizes:
    random = np.random.default_rng(0)
    return Sizes.from_arrays(random.integers(0, 4, 240), random.integers(5, 60, 240))


def test_what_each_kind_of_balance_brings_is_samples_over_seconds(sizes: Sizes, tmp_path: Path) -> None:
    options = PackOptions("balanced", 4, 128, micro_batches=4, data_parallel_size=1)
    index = build_index(sizes, tmp_path / "index", options, costs=COSTS)[0]
    random = random_index(index, sizes, tmp_path / "random")
    assert random.manifest["samples_per_pack"] == round(len(index.sample_ids) / index.num_packs)
    problem = LayoutProblem(make_profile(), 2, 4)
    layout = find_layouts(problem, "joint", seconds=0.1)[0].layout
    found = contributions(problem, layout, index, random)
    assert [name.split(":")[0] for name in found][1:] == ["+ data", "+ model", "+ memory"]
    stream = PackStream(index, 1, 4)
    runs = [stream.iteration(number) for number in range(stream.iterations_per_epoch)]
    samples = np.mean([sum(len(index.samples(pack)) for pack in run.ravel() if pack >= 0) for run in runs])
    whole = replace(problem, packs=judged_packs(index))
    assert [*found.values()][-1] == pytest.approx(samples / whole.step_seconds(layout))


def judged_packs(index: PackedIndex) -> PackSizes:
    """Eight iterations, or all: the middle of equal parts of the epoch."""
    stream = PackStream(index, 1, 4)
    count = min(8, stream.iterations_per_epoch)
    chosen = [int((part + 0.5) * stream.iterations_per_epoch / count) for part in range(count)]
    packs = np.stack([stream.iteration(number) for number in chosen])
    loads = np.where(packs[..., None] < 0, 0, np.asarray(index.loads)[packs])
    return PackSizes(loads[..., 0], loads[..., 1], loads[..., 2])


def test_a_headline_counts_what_was_packed(sizes: Sizes, tmp_path: Path) -> None:
    index = build_index(sizes, tmp_path / "index", PackOptions("isf", 4, 55, epochs=2), costs=COSTS)[0]
    fits = int(((sizes.tokens <= 55) & (sizes.tiles <= 4)).sum())
    packs = index.manifest["epoch_packs"][0]
    said = PackingView(index, sizes).headline
    assert said == (
        f"{fits} samples in {packs} packs of at most 4 tiles and 55 tokens, by method isf, {fits / packs:.1f} a pack; "
        f"{240 - fits} left out."
    )


def test_a_run_is_summed_up_by_its_intervals(tmp_path: Path) -> None:
    lines = [
        {"iteration": n, "samples": s, "seconds": t, "padding": p, "loss": loss, **waits(v, 0.5 * v)}
        for n, s, t, p, loss, v in ((9, 10, 50.0, 0.3, 9.0, 0.1), (18, 30, 2.0, 0.2, 5.0, 0.1),
                                    (19, 20, 3.0, 0.1, 4.0, 0.7), (20, 60, 5.0, 0.0, 1.0, 0.3))
    ]  # fmt: skip
    lines.insert(2, {"iteration": 18, "evaluation": {"loss": 7.0}})
    lines.append({"iteration": 20, "evaluation": {"loss": 6.5}})
    write_lines(tmp_path / "metrics.jsonl", *lines)
    chain = make_profile().chain
    Plan.from_cuts(chain, (4,), [(1, 2), (6,)], num_microbatches=2).save(tmp_path / "plan.json")
    (tmp_path / "evaluation.json").write_text('{"share_right": 0.75, "standard_error": 0.0125}')
    found = summary(tmp_path)
    assert found == {
        "samples": 120, "iterations": 20, "samples_an_iteration": 6.0, "padding": pytest.approx(0.15),
        "final_loss": pytest.approx((20 * 4.0 + 60 * 1.0) / 80), "recomputed_layers": 3, "held-out_loss": 6.5,
        "dist_ratio_vit": pytest.approx((18 * 0.1 + 0.7 + 0.3) / 20),
        "dist_ratio_llm": pytest.approx((18 * 0.1 + 0.7 + 0.3) / 40),
        "held-out_digits_read_right": 0.75, "held-out_digits_read_right_standard_error": 0.0125,
    }  # fmt: skip


def turn(number: int, seconds: float, others: float = 0.0) -> Turn:
    return Turn(number, [seconds] * 9, 2 * seconds, others)


def test_the_last_run_is_compared_with_all_others_and_with_the_baseline_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chain = make_profile().chain
    turns = {"baseline": (1.0, 2.0, 1.0, 7.0), "careful": (0.8, 4.0, 0.5, 9.0), "balanced": (1.0, 4.0, 0.5, 1.0, 1.0)}
    for (name, seconds), samples in zip(turns.items(), (10, 25, 40), strict=True):
        (tmp_path / name).mkdir()
        same = {"samples": samples, "seconds": 200.0, "padding": 0.0, "loss": 1.0, **waits(0.0, 0.0)}
        write_lines(tmp_path / name / "metrics.jsonl", *({"iteration": n, **same} for n in (1, 2)))
        Plan.from_cuts(chain, (4,), num_microbatches=2).save(tmp_path / name / "plan.json")
        others = [0.0, 0.0, 0.0, 0.4 if name == "careful" else 0.0, 0.0]
        of_run = [asdict(turn(n, *each)) for n, each in enumerate(zip(seconds, others, strict=False), 1)]
        write_lines(tmp_path / name / "turns.jsonl", *of_run)
    for name, share in (("baseline", 0.5), ("balanced", 0.75)):
        evaluation = {"share_right": share, "standard_error": 0.0125}
        (tmp_path / name / "evaluation.json").write_text(json.dumps(evaluation))
    runs = ["--run", str(tmp_path / "careful"), "--run", str(tmp_path / "balanced")]
    monkeypatch.setattr("sys.argv", ["compare.py", "--baseline", str(tmp_path / "baseline"), *runs])
    compare.main()
    *table, left_out, second, last = capsys.readouterr().out.splitlines()
    assert left_out == "Rounds that are left out, with other programs' share of the processors: 4 (40%)."
    # Seconds a sample: .032, .16, .02 beside .025, .1, .0125; and .1, .2, .1 beside these; medians .032, .025, .1.
    assert second == "balanced / careful samples a second: 1.28x (1.28 to 1.60 in 3 rounds)"
    assert last == "balanced / baseline samples a second: 4.00x (2.00 to 8.00 in 3 rounds)"
    shown = [" ".join(line.split()) for line in table]
    assert "samples an iteration 10 25 40" in shown
    assert "processor ms a sample 300 192 50" in shown
    assert "held-out digits read right 0.500 ± 0.013 - 0.750 ± 0.013" in shown


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ((0.5, 0.6, 0.0, 0.0), "in 2 of 4 rounds other programs had 50% to 60%"),
        ((0.5, 0.6, 0.7, 0.0, 0.0, 0.0), ""),
        ((0.5, 0.6, 0.7, 0.8, 0.0, 0.0, 0.0), "in 4 of 7 rounds other programs had 50% to 80%"),
        ((0.0, 0.0), "there were 2 rounds; 3 are needed"),
        ((), "took no turns"),
    ],
)
def test_seconds_of_a_busy_machine_are_not_compared(others: tuple[float, ...], said: str) -> None:
    runs = [[turn(n, seconds, share) for n, share in enumerate(others, 1)] for seconds in (2.0, 1.0)]
    compared = compare.compare(runs, (10, 10))
    assert compared.ratios == ([] if said else [(2.0, 2.0, 2.0)])
    assert said.lower() in compare.said(("one", "other"), compared)[0].lower()


def waits(tiles: float, tokens: float) -> dict[str, float]:
    return {"dist_ratio_vit": tiles, "dist_ratio_llm": tokens}


@pytest.mark.parametrize("together", [1, 4])
def test_the_error_of_a_share_of_digits_is_that_of_independent_answers(together: int) -> None:
    """A binomial's of answers: four digits that are right or wrong together say no more than one."""
    counts = [(together, together)] * 30 + [(together, 0)] * 10
    found = share_right(counts)
    assert found == {"share_right": 0.75, "standard_error": pytest.approx((0.75 * 0.25 / 40) ** 0.5)}


def test_nothing_recomputed_needs_its_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the plan as it is; in tests a GiB is a byte."""
    monkeypatch.setattr("omnibal_ext.report.breakdown.GIB", 1)
    problem = random_problem(2, ranks=1, microbatches=4, chunks=1, memory_bytes=float("inf"))
    whole = tuple(i for i, kind in enumerate(problem.profile.chain) if kind in ("vit", "llm"))
    layout = Layout((0, len(problem.profile.chain)), (whole,))
    needs = max(problem.stage_peak_bytes(Layout(layout.edges, ((),))))
    assert needs > 1.05 * max(problem.stage_peak_bytes(layout))
    (change,) = (change for change in changes(problem, layout) if change.what == "nothing recomputed")
    assert change.how == f"needs {needs:.2f} GiB on a rank: --memory-gib {needs:.2f}"
