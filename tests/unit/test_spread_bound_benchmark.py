"""What no order falls below: against every order there is, of few packs."""

from functools import cache
from itertools import combinations_with_replacement, permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.spread_bound import least_spread, least_waiting
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from tests.long import short
from tests.unit.packing.corpora import spread_against_random

Ints = NDArray[np.int64]


@cache
def all_orders(ranks: int, micro_batches: int) -> list[Ints]:
    """Every way to share out eight packs in iterations of D ranks x M microbatches, those that are the same once."""
    batch, found = ranks * micro_batches, {}
    for order in permutations(range(8)):
        cut = [order[first : first + micro_batches] for first in range(0, 8, micro_batches)]
        groups = [cut[first : first + ranks] for first in range(0, len(cut), ranks)]
        name = frozenset(frozenset(frozenset(rank) for rank in group) for group in groups)
        found.setdefault(name, np.array(order).reshape(8 // batch, ranks, micro_batches))
    return list(found.values())


def least_found(loads: Ints, seconds: NDArray[np.float64], shape: tuple[int, int], limit: float) -> float:
    spreads = [
        spread_against_random(order.reshape(len(order), -1), loads.astype(np.float64)).max()
        for order in all_orders(*shape)
        if wait(rank_loads(order, seconds)) <= limit
    ]
    return float(min(spreads, default=np.inf))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("seed", short(range(12), range(4)))
def test_no_order_of_all_there_are_spreads_less(shape: tuple[int, int], seed: int, parts: int) -> None:
    generator = np.random.default_rng(seed)
    tiles = generator.choice([0, 3, 4, 5, 8], 8) if seed % 2 else generator.integers(4, 6, 8)
    loads = np.stack([tiles, generator.integers(900, 1000, 8), generator.integers(100, 200, 8)], axis=1)
    seconds = loads[:, :2] * [0.2, 0.001]
    if parts == 1 and shape[1] == 1:
        seconds = seconds.sum(axis=1, keepdims=True)
    for limit in (0.0, 0.003, 0.01, 0.03, 0.1, 0.3):
        bound = least_spread(all_orders(*shape)[0], loads, seconds, 0.2, limit)
        assert bound <= least_found(loads, seconds, shape, limit) + 1e-9


def test_two_packs_without_tiles_share_an_iteration_if_nobody_may_wait() -> None:
    """Two packs of no tiles among full ones: they share an iteration, if nobody may wait."""
    loads = np.array([[0, 1, 1]] * 2 + [[8, 1, 1]] * 6)
    seconds = np.stack([loads[:, 0] * 0.2, np.zeros(8)], axis=1)
    for shape, tight in (((2, 1), 0.85), ((2, 2), 0.7)):
        bounds = [least_spread(all_orders(*shape)[0], loads, seconds, 0.2, limit) for limit in (0.0, 0.01, 0.1)]
        found = least_found(loads, seconds, shape, 0.0)
        assert tight * found <= bounds[0] <= found
        assert bounds[0] > bounds[1] > bounds[2]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("count", [4, 5, 6])
@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_all_there_are_waits_less(seed: int, count: int, parts: int) -> None:
    """Whatever completes the last iteration of three ranks; for one part and whole iterations the bound is reached."""
    seconds = np.random.default_rng(seed).uniform(0.5, 1.5, (count, parts))
    waits = []
    for order in permutations(range(count)):
        for fill in combinations_with_replacement(range(count), -count % 3):
            waits.append(wait(seconds[np.array([*order, *fill]).reshape(-1, 3)]))
    bound = least_waiting(seconds, 3)
    assert bound <= min(waits) + 1e-12
    if parts == 1 and count == 6:
        assert bound == pytest.approx(min(waits))
    if parts == 1:
        assert bound > 0.3 * min(waits)
