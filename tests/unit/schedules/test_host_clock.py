"""A host asks for kernels, one after the other, and waits for none; its device runs them as they are asked for.

The simulator knows actions alone. Here every one is many kernels, on devices and hosts that are stepped one by one.
"""

from dataclasses import replace

import numpy as np
import pytest

from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import compile_schedule
from omnibal_ext.schedules.schedule import build_schedule
from omnibal_ext.schedules.simulate import StageCosts, simulate
from tests.unit.schedules.uniform import uniform

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
        floors = replace(
            costs, host=None,
            forward=np.maximum(forward, host[0][:, None]), backward=np.maximum(backward, host[1][:, None]),
        )  # fmt: skip
        assert simulate(program, floors).step_seconds > 1.02 * exact, "a floor under every action is too much"


def test_hosts_that_take_no_time_change_nothing() -> None:
    """To the bit."""
    random = np.random.default_rng(0)
    costs = uniform(6, random.uniform(1, 2, 4), random.uniform(2, 4, 4), transfer=[0.1] * 4)
    program = compile_schedule(build_schedule("zb_h1", 4, 6, 1), 6)
    with_none, with_zeros = (simulate(program, replace(costs, host=host)) for host in (None, np.zeros((3, 4))))
    assert np.array_equal(with_none.end, with_zeros.end)
