"""The simulator against closed forms, a slow one written from the definition, and hosts asking for kernels one by one.

The simulator knows actions alone. In `kernel_by_kernel` every one is many kernels.
"""

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal_ext.schedules.actions import Action, Beside, Schedule
from omnibal_ext.schedules.clock import SIDE_BY_SIDE, Seconds, last_ends, play
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import compile_schedule
from omnibal_ext.schedules.schedule import SCHEDULE_NAMES, build_schedule, one_f_one_b, placement_of
from omnibal_ext.schedules.simulate import Encoding, StageCosts, simulate
from tests.unit.drawn import drawn_lists, placements
from tests.unit.schedules.test_simulate_beside import most_bytes, reference_times
from tests.unit.schedules.uniform import uniform

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
    assert simulate(program, costs).step_seconds == pytest.approx(m * (f + b) + (p - 1) * (f + b) / v)


@given(st.sampled_from(["zb_h1", "zb_h2"]), st.integers(1, 8), st.integers(0, 9), st.integers(1, 4))
def test_zero_bubble_waits_only_for_the_pipe_to_fill(name: str, p: int, extra: int, v: int) -> None:
    """Qi et al. 2023 with f = b = w: H1's bubble is (p - 1)(f + b - w), the wait for the first input; with chunks and
    no more memory, one part of a group more at most."""
    m = p + extra
    costs = uniform(m, [1.0] * p * v, [2.0] * p * v, weight=[1.0] * p * v)
    program = compile_schedule(build_schedule(name, p, m, v), m, placement_of(name, p, v))
    seconds = simulate(program, costs).step_seconds
    least = 3 * m * v + (p - 1)
    assert seconds == pytest.approx(least) if v == 1 or name == "zb_h2" else least <= seconds + 1e-9 <= least + p


@pytest.mark.parametrize("cases", [1, SIDE_BY_SIDE, SIDE_BY_SIDE + 1, 3 * SIDE_BY_SIDE - 1])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v"])
def test_cases_side_by_side_end_when_each_does_alone(name: str, cases: int) -> None:
    """To the bit, whether ranks or their hosts are slow."""
    random, placement = np.random.default_rng(cases), placement_of(name, 3, 2)
    rows = compile_schedule(build_schedule(name, 3, 7, 2), 7, placement).rows
    work, transfers = random.uniform(0, 2, (3, 6, cases, 7)), random.uniform(0, 2, (6, cases, 7))
    for hosts in (0.0, 1.5):
        taken = Seconds(work, transfers, random.uniform(0, hosts, (3, 6)))
        alone = np.stack([play(rows, taken, case)[2] for case in range(cases)])
        assert np.array_equal(last_ends(rows, taken), alone)


def _follows_the_definition(schedule: Schedule, placement: Placement, m: int, seed: int) -> None:
    random, stages = np.random.default_rng(seed), placement.stages
    forward, backward, transfer, kept, late, transient = random.uniform(0.1, 2, (6, stages, m))
    fixed, step = random.uniform(0.1, 2, (2, stages))
    host = random.uniform(0, 2, (3, stages)) if seed % 2 else None
    costs = StageCosts(forward, backward, backward * 0.4, transfer, kept, late, transient, fixed, step, host)
    played = simulate(compile_schedule(schedule, m, placement), costs)
    nothing = np.zeros((placement.ranks, m))
    alone = Beside(((),) * m, ahead=True), costs, Encoding(
        np.stack([nothing] * 2), nothing[0], nothing, nothing, nothing[0], nothing[:, 0], nothing[:, 0]
    )  # fmt: skip
    slow = {place: end for place, (_, end) in reference_times(schedule, placement, *alone).items()}
    last = [max(end for (rank, _), end in slow.items() if rank == r) for r in range(placement.ranks)]
    for r in range(placement.ranks):
        timeline = played.timeline(r)
        assert [action for action, _, _ in timeline] == schedule[r]
        assert [end for _, _, end in timeline] == pytest.approx([slow[r, a] for a in schedule[r]])
        assert all(one[2] <= two[1] + 1e-12 for one, two in pairwise(timeline))
        last[r] += sum(step[s] for s in range(stages) if placement.ranks_of[s] == r)
        assert played.peak_bytes[r] == pytest.approx(most_bytes(played, r, placement, *alone))
    assert played.step_seconds == pytest.approx(max(last))
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


KERNELS = 400
"""Of an action."""


def kernel_by_kernel(schedule: list, costs: StageCosts, ranks_of: tuple[int, ...]) -> float:
    """The last end of all, on one stage a rank."""
    assert costs.host is not None
    hosts, devices, at = ([0.0] * len(schedule) for _ in range(3))
    ends: dict[tuple[str, int, int], float] = {}
    while any(place < len(actions) for place, actions in zip(at, schedule, strict=True)):
        for rank, actions in enumerate(schedule):
            while at[rank] < len(actions):
                kind, m = actions[int(at[rank])].kind, actions[int(at[rank])].microbatch
                there = rank - 1 if kind == "F" else rank + 1
                arrival = 0.0
                if 0 <= there < len(ranks_of):
                    if (kind, there, m) not in ends:
                        break
                    arrival = ends[kind, there, m] + costs.transfer[min(rank, there), m]
                table, asks = (costs.forward, costs.host[0]) if kind == "F" else (costs.backward, costs.host[1])
                for _ in range(KERNELS):
                    hosts[rank] += asks[rank] / KERNELS
                    devices[rank] = max(devices[rank], arrival, hosts[rank]) + table[rank, m] / KERNELS
                ends[kind, rank, m] = devices[rank]
                at[rank] += 1
    return max(devices)


@pytest.mark.parametrize("times", [0.0, 0.9, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_is_predicted_whether_hosts_or_devices_set_the_pace(times: float, seed: int) -> None:
    """To 2%, host seconds of 0 to 3 times the device's, packs that differ, backwards that are asked for quickly."""
    random, ranks, microbatches = np.random.default_rng(seed), 1 + seed, 8
    forward, backward = random.uniform(0.5, 1.5, (2, ranks, microbatches)) * np.array([[[1.0]], [[2.0]]])
    costs = uniform(microbatches, [1.0] * ranks, [2.0] * ranks, transfer=[0.05] * ranks)
    host = times * np.stack([np.full(ranks, 1.2), np.full(ranks, 1.0), np.zeros(ranks)])
    costs = replace(costs, forward=forward, backward=backward, host=host)
    schedule = build_schedule("1f1b", ranks, microbatches, 1)
    program = compile_schedule(schedule, microbatches, Placement.interleaved(ranks))
    exact = kernel_by_kernel(schedule, costs, program.placement.ranks_of)
    assert simulate(program, costs).step_seconds == pytest.approx(exact, rel=0.02)
    if times == 1.0:
        least = (np.maximum(forward, host[0][:, None]), np.maximum(backward, host[1][:, None]))
        floors = replace(costs, host=None, forward=least[0], backward=least[1])
        assert simulate(program, floors).step_seconds > 1.02 * exact, "a floor under every action is too much"


def test_hosts_that_take_no_time_change_nothing() -> None:
    """To the bit."""
    random = np.random.default_rng(0)
    costs = uniform(6, random.uniform(1, 2, 4), random.uniform(2, 4, 4), transfer=[0.1] * 4)
    program = compile_schedule(build_schedule("zb_h1", 4, 6, 1), 6)
    with_none, with_zeros = (simulate(program, replace(costs, host=host)) for host in (None, np.zeros((3, 4))))
    assert np.array_equal(with_none.end, with_zeros.end)
