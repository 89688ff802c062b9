"""Some waiting for more mixing: never more than the limit, and as much mixing for it as small cases can have."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.packing.ordering.swap_packs import swap_packs

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def likeness(seconds: Floats) -> Ints:
    return np.argsort(seconds.sum(axis=1), kind="stable")


def squares(features: Floats, slots: Ints) -> float:
    return float((features[slots].sum(axis=(1, 2)) ** 2).sum())


@given(
    st.integers(2, 12), st.integers(1, 5), st.integers(1, 3), st.integers(1, 2), st.floats(0.0005, 0.2),
    st.integers(0, 99),
)  # fmt: skip
def test_packs_run_once_and_wait_no_longer_than_the_limit(
    iterations: int, ranks: int, micro_batches: int, parts: int, limit: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    packs = iterations * ranks * micro_batches
    seconds, features = generator.uniform(0.5, 1.5, (packs, parts)), generator.normal(size=(packs, 3))
    slots = generator.permutation(packs).reshape(iterations, ranks, micro_batches)
    before = slots.copy()
    after = swap_packs(seconds, features, slots, limit, seed, 1.0)
    assert np.array_equal(np.sort(after.ravel()), np.arange(packs))
    assert np.array_equal(slots, before)
    waited = wait(rank_loads(slots, seconds))
    assert wait(rank_loads(after, seconds)) <= max(limit, waited) + 1e-9
    if waited <= limit and wait(rank_loads(after, seconds)) >= waited - 1e-9:
        assert squares(features, after) <= squares(features, slots) + 1e-9
    assert np.array_equal(after, swap_packs(seconds, features, slots, limit, seed, 1.0))


@pytest.mark.parametrize("limit", [0.02, 0.05, 0.1])
def test_no_way_to_mix_more_of_all_there_are(limit: float) -> None:
    """Six packs in iterations of two ranks, 15 ways: of those within the limit one of the best, nine times in ten."""
    best_found = 0
    for seed in range(30):
        generator = np.random.default_rng(seed)
        seconds, features = generator.uniform(0.9, 1.1, (6, 1)), generator.normal(size=(6, 2))
        ways = [np.array(way).reshape(3, 2, 1) for way in permutations(range(6))]
        possible = [way for way in ways if wait(rank_loads(way, seconds)) <= limit]
        start = likeness(seconds).reshape(3, 2, 1)  # waits least
        assert bool(possible) == (wait(rank_loads(start, seconds)) <= limit)
        found = swap_packs(seconds, features, start, limit, seed, 1.0)
        least = min((squares(features, way) for way in possible), default=np.inf)
        best_found += squares(features, found) <= 1.05 * least + 1e-9
    assert best_found >= 27


def test_what_waits_too_long_comes_to_wait_less() -> None:
    """Two costs in every iteration: packs of one cost find each other, whatever that mixes."""
    seconds, features = np.tile([[1.0], [1.5]], (40, 1)), np.random.default_rng(0).normal(size=(80, 2))
    slots = np.arange(80).reshape(40, 2, 1)
    assert wait(rank_loads(swap_packs(seconds, features, slots, 0.01, 0, 1.0), seconds)) <= 0.01


def test_what_costs_little_and_brings_much_comes_first() -> None:
    """Half of the packs are a thousandth dearer, a tenth is dearer by half: those stay together, these mix."""
    seconds = np.ones((800, 1))
    seconds[:400] += 0.001
    seconds[400:480] += 0.5
    features = np.repeat([[1.0], [-1.0]], 400, axis=0)
    slots = np.arange(800).reshape(100, 8, 1)
    after = swap_packs(seconds, features, slots, 0.003, 0, 1.0)
    dear = (seconds[after] > 1.4).sum(axis=(1, 2))
    assert ((dear == 0) | (dear == 8)).all()
    # Ten iterations of dear packs, and of the others 80 packs too many of one kind: 2 in each of 40 iterations.
    assert squares(features, after) == 10 * 8**2 + 40 * 2**2
