"""The simulator against closed forms, and against a slow one written from the definition."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal_ext.errors import UserError
from omnibal_ext.schedule import SCHEDULE_NAMES, Action, Schedule, build_schedule, dependencies, one_f_one_b
from omnibal_ext.simulate import StageCosts, compile_schedule, simulate, step_seconds

seconds = st.floats(0.01, 10.0)


@given(st.sampled_from(["1f1b", "gpipe"]), st.integers(1, 8), st.integers(1, 16), seconds, seconds)
def test_equal_stages_take_m_plus_p_minus_1_rounds(name: str, p: int, m: int, f: float, b: float) -> None:
    played = simulate(compile_schedule(build_schedule(name, p, m), m), StageCosts.uniform(m, [f] * p, [b] * p))
    assert played.step_seconds == pytest.approx((m + p - 1) * (f + b))
    assert played.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@given(st.integers(1, 6), st.integers(0, 9), st.integers(1, 4), seconds, seconds)
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, extra: int, v: int, f: float, b: float) -> None:
    """Narayanan et al. 2021: bubble (p - 1)(f + b) / v; here also for microbatches that the ranks do not divide."""
    m = p + extra
    program = compile_schedule(build_schedule("1f1b", p, m, v), m, v)
    costs = StageCosts.uniform(m, [f / v] * (p * v), [b / v] * (p * v))
    assert step_seconds(program, costs) == pytest.approx(m * (f + b) + (p - 1) * (f + b) / v)


@given(st.sampled_from(["zb_h1", "zb_h2"]), st.integers(1, 8), st.integers(0, 9), st.integers(1, 4))
def test_zero_bubble_waits_only_for_the_pipe_to_fill(name: str, p: int, extra: int, v: int) -> None:
    """Qi et al. 2023 with f = b = w: H1's bubble is (p - 1)(f + b - w), the wait for the first input; with chunks and
    no more memory, one part of a group more at most."""
    m = p + extra
    costs = StageCosts.uniform(m, [1.0] * p * v, [2.0] * p * v, weight=[1.0] * p * v)
    seconds = step_seconds(compile_schedule(build_schedule(name, p, m, v), m, v), costs)
    least = 3 * m * v + (p - 1)
    assert seconds == pytest.approx(least) if v == 1 or name == "zb_h2" else least <= seconds + 1e-9 <= least + p


def test_the_slowest_stage_paces_1f1b() -> None:
    costs = StageCosts.uniform(4, [1, 3, 1], [2, 6, 2])
    assert step_seconds(compile_schedule(one_f_one_b(3, 4), 4), costs) == 1 + 4 * 9 + 2


def test_transfers_delay_and_the_last_part_of_the_step_is_added() -> None:
    costs = StageCosts.uniform(1, [1, 1], [2, 2], transfer=[0.5, 9], step=[0.25, 3])
    program = compile_schedule(one_f_one_b(2, 1), 1)
    assert step_seconds(program, costs) == max(1 + 0.5 + 3 + 0.5 + 2 + 0.25, 4.5 + 3)
    assert simulate(program, costs).step_seconds == step_seconds(program, costs)


def _slow(schedule: Schedule, costs: StageCosts, chunks: int) -> dict[tuple[int, Action], float]:
    """Ends by repeated relaxation of the definition."""
    ranks, split = len(schedule), any(a.kind == "W" for a in schedule[0])
    ends: dict[tuple[int, Action], float] = {}
    while len(ends) < sum(map(len, schedule)):
        for r, actions in enumerate(schedule):
            before = 0.0
            for a in actions:
                waits = dependencies(a, r, ranks, chunks)
                if any(w not in ends for w in waits):
                    break
                s, m = a.chunk * ranks + r, a.microbatch
                arrivals = [before]
                for other, w in waits:
                    there = w.chunk * ranks + other
                    arrivals.append(ends[other, w] + (costs.transfer[min(s, there), m] if there != s else 0))
                cost = {"F": costs.forward[s, m], "B": costs.backward[s, m], "W": costs.weight[s, m]}[a.kind]
                cost -= costs.weight[s, m] if split and a.kind == "B" else 0
                before = ends[r, a] = max(arrivals) + cost
    return ends


@settings(max_examples=60)
@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 2**31))
def test_any_schedule_with_any_costs_follows_the_definition(name: str, p: int, m: int, v: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    v = 1 if name == "gpipe" and seed % 2 else v
    forward, backward, transfer, kept, late = random.uniform(0.1, 2, (5, p * v, m))
    zeros = np.zeros(p * v)
    costs = StageCosts(forward, backward, backward * 0.4, transfer, kept, late, np.zeros((p * v, m)), zeros, zeros)
    schedule = build_schedule(name, p, m, v)
    program = compile_schedule(schedule, m, v)
    played = simulate(program, costs)
    slow = _slow(schedule, costs, v)
    for r in range(p):
        timeline = played.timeline(r)
        assert [action for action, _, _ in timeline] == schedule[r]
        assert [end for _, _, end in timeline] == pytest.approx([slow[r, a] for a in schedule[r]])
        assert all(one[2] <= two[1] + 1e-12 for one, two in pairwise(timeline))
    assert played.step_seconds == step_seconds(program, costs) == pytest.approx(max(slow.values()))
    assert played.bubble_fraction == pytest.approx(1 - (forward + backward).sum() / (p * max(slow.values())))


@given(st.integers(1, 6), st.integers(1, 12))
def test_1f1b_holds_kept_bytes_of_the_microbatches_in_flight(p: int, m: int) -> None:
    costs = StageCosts.uniform(m, [1.0] * p, [2.0] * p, kept=[5.0] * p, transient=[2.0] * p, fixed_bytes=[100.0] * p)
    played = simulate(compile_schedule(one_f_one_b(p, m), m), costs)
    assert played.peak_bytes.tolist() == [100 + 5 * min(p - s, m) + 2 for s in range(p)]
    assert [played.memory_timeline(s)[-1][1] for s in range(p)] == [100.0] * p


def test_between_b_and_w_only_what_w_needs_is_held() -> None:
    schedule = [[Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1), Action("W", 0), Action("W", 1)]]
    costs = StageCosts.uniform(2, [1.0], [2.0], kept=[10.0], late=[3.0], transient=[1.0])
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
    costs = StageCosts.uniform(256, [1.0] * 16, [2.0] * 16)
    simulate(compile_schedule(schedule, 256), costs)
    program = compile_schedule(schedule, 256)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        simulate(program, costs)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.020
