"""The simulator against closed forms, and against a slow one written from the definition."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal_ext.errors import UserError
from omnibal_ext.schedules.actions import Action, Schedule
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import compile_schedule
from omnibal_ext.schedules.schedule import SCHEDULE_NAMES, build_schedule, one_f_one_b, placement_of
from omnibal_ext.schedules.simulate import StageCosts, simulate
from tests.unit.drawn import drawn_lists, placements
from tests.unit.schedules.uniform import step_seconds, uniform

seconds = st.floats(0.01, 10.0)


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 8), st.integers(1, 16), seconds, seconds)
def test_equal_stages_take_m_plus_p_minus_1_rounds(name: str, p: int, m: int, f: float, b: float) -> None:
    played = simulate(compile_schedule(build_schedule(name, p, m), m), uniform(m, [f] * p, [b] * p))
    assert played.step_seconds == pytest.approx((m + p - 1) * (f + b))
    assert played.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@given(st.integers(1, 6), st.integers(0, 9), st.integers(1, 4), seconds, seconds)
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, extra: int, v: int, f: float, b: float) -> None:
    """Narayanan et al. 2021: bubble (p - 1)(f + b) / v; here also for microbatches that the ranks do not divide."""
    m = p + extra
    program = compile_schedule(build_schedule("1f1b", p, m, v), m, Placement.interleaved(p, v))
    costs = uniform(m, [f / v] * (p * v), [b / v] * (p * v))
    assert step_seconds(program, costs) == pytest.approx(m * (f + b) + (p - 1) * (f + b) / v)


@given(st.sampled_from(["zb_h1", "zb_h2"]), st.integers(1, 8), st.integers(0, 9), st.integers(1, 4))
def test_zero_bubble_waits_only_for_the_pipe_to_fill(name: str, p: int, extra: int, v: int) -> None:
    """Qi et al. 2023 with f = b = w: H1's bubble is (p - 1)(f + b - w), the wait for the first input; with chunks and
    no more memory, one part of a group more at most."""
    m = p + extra
    costs = uniform(m, [1.0] * p * v, [2.0] * p * v, weight=[1.0] * p * v)
    seconds = step_seconds(compile_schedule(build_schedule(name, p, m, v), m, placement_of(name, p, v)), costs)
    least = 3 * m * v + (p - 1)
    assert seconds == pytest.approx(least) if v == 1 or name == "zb_h2" else least <= seconds + 1e-9 <= least + p


def _slow(
    schedule: Schedule, costs: StageCosts, ranks_of: tuple[int, ...]
) -> tuple[dict[tuple[int, Action], float], list[float]]:
    """Ends, and most bytes of ranks, by repeated relaxation of the definition over stages."""
    split = any(a.kind == "W" for a in schedule[0])
    own = [[s for s, rank in enumerate(ranks_of) if rank == r] for r in range(len(schedule))]
    ends: dict[tuple[str, int, int], float] = {}
    found: dict[tuple[int, Action], float] = {}
    while len(found) < sum(map(len, schedule)):
        for r, actions in enumerate(schedule):
            before = asked = 0.0
            for a in actions:
                s, m = own[r][a.chunk], a.microbatch
                asked += 0.0 if costs.host is None else costs.host["FBW".index(a.kind), s]
                waits = {"F": [("F", s - 1)], "B": [("F", s), ("B", s + 1)], "W": [("B", s)]}[a.kind]
                waits = [(kind, there) for kind, there in waits if 0 <= there < len(ranks_of)]
                if any((kind, there, m) not in ends for kind, there in waits):
                    break
                away = [there for _, there in waits if ranks_of[there] != r]
                arrivals = [ends[kind, there, m] for kind, there in waits if there not in away]
                arrivals += [ends[a.kind, there, m] + costs.transfer[min(s, there), m] for there in away]
                cost = {"F": costs.forward[s, m], "B": costs.backward[s, m], "W": costs.weight[s, m]}[a.kind]
                cost -= costs.weight[s, m] if split and a.kind == "B" else 0
                before = found[r, a] = ends[a.kind, s, m] = max(max([before, *arrivals]) + cost, asked)
    peaks = []
    for r, actions in enumerate(schedule):
        held = most = 0.0
        for a in actions:
            s, m = own[r][a.chunk], a.microbatch
            late = costs.late[s, m] if split else 0.0
            most = max(most, held + (costs.transient[s, m] if a.kind == "B" else 0.0))
            held += {"F": costs.kept[s, m], "B": late - costs.kept[s, m], "W": -late}[a.kind]
            most = max(most, held)
        peaks.append(most + sum(costs.fixed_bytes[s] for s in own[r]))
    return found, peaks


def _follows_the_definition(schedule: Schedule, placement: Placement, m: int, seed: int) -> None:
    random, stages = np.random.default_rng(seed), placement.stages
    forward, backward, transfer, kept, late, transient = random.uniform(0.1, 2, (6, stages, m))
    fixed, step = random.uniform(0.1, 2, (2, stages))
    host = random.uniform(0, 2, (3, stages)) if seed % 2 else None
    costs = StageCosts(forward, backward, backward * 0.4, transfer, kept, late, transient, fixed, step, host)
    program = compile_schedule(schedule, m, placement)
    played = simulate(program, costs)
    slow, peaks = _slow(schedule, costs, placement.ranks_of)
    last = [max(end for (rank, _), end in slow.items() if rank == r) for r in range(placement.ranks)]
    for r in range(placement.ranks):
        timeline = played.timeline(r)
        assert [action for action, _, _ in timeline] == schedule[r]
        assert [end for _, _, end in timeline] == pytest.approx([slow[r, a] for a in schedule[r]])
        assert all(one[2] <= two[1] + 1e-12 for one, two in pairwise(timeline))
        last[r] += sum(step[s] for s in range(stages) if placement.ranks_of[s] == r)
    assert played.step_seconds == pytest.approx(max(last))
    assert played.peak_bytes.tolist() == pytest.approx(peaks)
    busy = (forward + backward).sum()
    assert played.bubble_fraction == pytest.approx(1 - busy / (placement.ranks * max(slow.values())))


@settings(max_examples=60)
@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**31))
def test_any_schedule_with_any_costs_follows_the_definition(name: str, p: int, m: int, v: int, seed: int) -> None:
    v = 1 if name == "gpipe" and seed % 2 else v
    _follows_the_definition(build_schedule(name, p, m, v), placement_of(name, p, v), m, seed)


@settings(max_examples=60)
@given(placements, st.integers(1, 6), st.integers(0, 2**31))
def test_any_lists_on_any_placement_follow_the_definition(placement: Placement, m: int, seed: int) -> None:
    _follows_the_definition(drawn_lists(placement, m, seed), placement, m, seed)


def test_between_b_and_w_only_what_w_needs_is_held() -> None:
    schedule = [[Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1), Action("W", 0), Action("W", 1)]]
    costs = uniform(2, [1.0], [2.0], kept=[10.0], late=[3.0], transient=[1.0])
    played = simulate(compile_schedule(schedule, 2), costs)
    assert [held for _, held in played.memory_timeline(0)] == [10, 3, 13, 6, 3, 0]
    assert played.peak_bytes.tolist() == [14]


def test_a_deadlock_is_refused_before_playing() -> None:
    schedule = [[Action("B", 0), Action("F", 0)]]
    with pytest.raises(UserError, match="rank 0 waits for ever"):
        compile_schedule(schedule, 1)
    with pytest.raises(UserError, match="twice"):
        compile_schedule([[Action("F", 0), Action("F", 0)]], 1)


def test_16_ranks_256_microbatches_under_20_ms() -> None:
    schedule = one_f_one_b(16, 256)
    costs = uniform(256, [1.0] * 16, [2.0] * 16)
    simulate(compile_schedule(schedule, 256), costs)
    program = compile_schedule(schedule, 256)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        simulate(program, costs)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.020
