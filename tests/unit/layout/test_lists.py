"""Lists built for a plan: as fast as the best of all lists on small instances, never slower than those they start from.

All is judged by the simulator, which knows nothing of the search.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.errors import UserError
from omnibal_ext.layout.lists import build_lists, costs_of, state_of
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import BUILT, find_layouts, find_plan, make_plan
from omnibal_ext.layout.state import stages_of
from omnibal_ext.schedules.actions import Action, Schedule, check_packs
from omnibal_ext.schedules.program import check_schedule

from .instances import random_problem, refuse_clocks


def _kinds(counts: tuple[int, int, int], waits: tuple[int, ...]) -> Iterator[str]:
    """All orders of so many F, B and W; the n-th B needs `waits[n]` forwards before it, the n-th W so many B."""
    f, b, w = counts
    if f == b == w == len(waits):
        yield ""
    for kind, allowed in (("F", f < len(waits)), ("B", b < len(waits) and f >= waits[b]), ("W", w < b)):
        if allowed:
            more = tuple(n + (kind == k) for n, k in zip(counts, "FBW", strict=True))
            yield from (kind + rest for rest in _kinds(more, waits))


def _all_lists(ranks: int, microbatches: int) -> Iterator[Schedule]:
    """Every list of one chunk a rank whose ranks keep one order of backwards, those that deadlock left out."""
    for backwards in permutations(range(microbatches)):
        most = tuple(np.maximum.accumulate(backwards) + 1)
        orders = {"F": range(microbatches), "B": backwards, "W": backwards}
        for words in product(list(_kinds((0, 0, 0), most)), repeat=ranks):
            schedule = [[Action(k, orders[k][word[:i].count(k)]) for i, k in enumerate(word)] for word in words]
            try:
                check_schedule(schedule, microbatches)
            except UserError:
                continue
            yield schedule


@pytest.mark.parametrize("seed", range(6))
def test_lists_are_the_best_of_all_that_fit(seed: int) -> None:
    problem = random_problem(seed, ranks=2, microbatches=2, chunks=1, schedule_name="zb_auto", memory_bytes=1e9)
    layout = find_layouts(problem, "layers")[0].layout
    full = replace(problem, packs=None)
    peaks = full.simulate(layout).peak_bytes
    problem = replace(problem, memory_bytes=float(peaks.max() * 1.05))
    least = np.inf
    for lists in _all_lists(2, 2):
        way = replace(problem, lists=lists)
        if replace(way, packs=None).simulate(layout).peak_bytes.max() <= problem.memory_bytes:
            least = min(least, way.step_seconds(layout))
    built, same = build_lists(problem, layout, 0.2, movable=False)
    assert same == layout
    assert built.step_seconds(layout) == pytest.approx(least)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 3), st.sampled_from(list(BUILT)))
def test_lists_never_lose_and_always_fit_and_run(seed: int, search: int, name: str) -> None:
    problem = random_problem(seed, schedule_name=name)
    try:
        start = find_layouts(problem, "joint", seconds=0.0)[0]
    except UserError:
        return
    built, layout = build_lists(problem, start.layout, 0.02, search)
    check_schedule(built.schedule, problem.microbatches, problem.placement)
    check_packs(built.schedule, problem.chunks)
    assert replace(built, packs=None).simulate(layout).peak_bytes.max() <= problem.memory_bytes * (1 + 1e-12)
    assert built.step_seconds(layout) <= start.step_seconds
    assert layout.edges[0] == 0
    assert layout.edges[-1] == len(problem.profile.chain)


@pytest.mark.slow
def test_a_pipeline_of_large_models_gains_and_the_plan_has_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 7 microbatches, where lists made for equal stages wait; and no clock is read."""
    profile = analytic_profile(preset("internvit-6b+internlm2-20b"), "a100", 9, 4096, 2, 4)
    problem = LayoutProblem(profile, 4, 7, 3, "zb_auto", 80e9)
    build_lists(problem, find_layouts(problem, "profile")[0].layout, 0.0)  # compiles
    refuse_clocks(monkeypatch)
    built, candidates = find_plan(problem, "joint", seconds=0.1)
    before = find_layouts(problem, "joint", seconds=0.1)[0].step_seconds
    assert candidates[0].step_seconds < 0.96 * before
    plan = make_plan(built, candidates, "joint")
    plan.validate()
    assert plan.build_schedule() == built.schedule != problem.schedule
    assert plan.predicted["step_seconds"] == pytest.approx(candidates[0].step_seconds)
    assert max(plan.predicted["stage_peak_bytes"]) <= 80e9
    again, others = find_plan(problem, "joint", seconds=0.1)
    assert again.lists == built.lists
    assert others == candidates


@given(st.integers(0, 10**6), st.sampled_from(["layers", "profile"]))
@settings(max_examples=20)
def test_other_methods_keep_their_cuts(seed: int, method: str) -> None:
    problem = random_problem(seed, schedule_name="zb_auto")
    try:
        before = find_layouts(problem, method)[0]
    except UserError:
        return
    built, candidates = find_plan(problem, method, seconds=0.02)
    assert candidates[0].layout == before.layout
    assert candidates[0].step_seconds <= before.step_seconds
    assert all(max(built.stage_peak_bytes(c.layout)) <= problem.memory_bytes for c in candidates)


def test_without_a_pipeline_there_is_nothing_to_build() -> None:
    problem = random_problem(3, ranks=1, microbatches=4, chunks=1, schedule_name="zb_auto", memory_bytes=1e9)
    layout = Layout((0, len(problem.profile.chain)), ((),))
    assert build_lists(problem, layout) == (problem, layout)


@given(st.integers(0, 10**6))
def test_the_search_counts_bytes_as_the_simulator_does(seed: int) -> None:
    """Kept and late ones of every stage, with features that it receives; what weights leave; what recomputing adds."""
    problem = random_problem(4 * seed + 3, schedule_name="zb_auto", memory_bytes=1e9)  # features enter later layers
    layout = find_layouts(problem, "profile", recompute="full")[0].layout
    whole = replace(problem, packs=None).stage_costs(layout)
    stages = stages_of(state_of(problem, layout), costs_of(problem))
    kept, late, on_top = whole.kept[:, 0], whole.late[:, 0], whole.transient[:, 0]
    found = (*stages.taken, *stages.needs, stages.room)
    wanted = (kept, late - kept, -late, kept, np.maximum(on_top, late - kept), 0.0,
              problem.memory_bytes - problem.placement.by_rank(whole.fixed_bytes))  # fmt: skip
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)
