"""What no packs fall below in random order: against every way there is to pack a few samples, and every draw."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest

from benchmarks.waiting_bound import least_of_whole_tiles, least_waiting

BUDGET = 12


def all_packings(samples: int, packs: int) -> Iterator[list[int]]:
    """The pack of each sample, in every way that leaves none empty, those that are the same once."""

    def grow(chosen: list[int]) -> Iterator[list[int]]:
        if len(chosen) == samples:
            if max(chosen) + 1 == packs:
                yield chosen
            return
        for pack in range(min(max(chosen, default=-1) + 2, packs)):
            yield from grow([*chosen, pack])

    return grow([])


def least_found(seconds: np.ndarray, tokens: np.ndarray, packs: int, ranks: int, budget: int) -> float:
    found = []
    for packing in all_packings(len(seconds), packs):
        if np.bincount(packing, tokens).max() <= budget:
            costs = np.bincount(packing, seconds)
            steps = [costs[list(step)] for step in combinations(range(packs), ranks)]
            found.append(1 - costs.mean() / np.mean([step.max() for step in steps]))
    return min(found, default=np.inf)


@pytest.mark.parametrize(("packs", "ranks"), [(3, 2), (4, 2), (4, 3), (4, 4)])
@pytest.mark.parametrize("seed", range(6))
def test_no_packing_of_any_kind_waits_less_than_the_bound(seed: int, packs: int, ranks: int) -> None:
    generator = np.random.default_rng(seed)
    seconds = generator.integers(1, 6, 8) ** generator.choice([1.0, 2.0])
    bound = least_waiting(seconds, packs, ranks)
    assert -1e-12 <= bound <= least_found(seconds, np.zeros(8), packs, ranks, 1) + 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_whole_tiles_bound_packs_within_a_budget_of_tokens_too(seed: int) -> None:
    generator = np.random.default_rng(seed)
    tiles, tokens = generator.integers(0, 3, 8), generator.integers(2, 6, 8)
    packs = -(-int(tokens.sum()) // BUDGET) + 1
    seconds = 2.0 * tiles + 0.5 * tokens
    whole = least_of_whole_tiles(tiles, tokens, (2.0, 0.5), BUDGET, packs)
    bound = least_waiting(seconds, packs, 2, whole)
    assert bound <= least_found(seconds, tokens, packs, 2, BUDGET) + 1e-12


def test_the_bound_is_reached_by_one_long_sample_and_by_tiles_left_over() -> None:
    one_long = np.array([6.0, *[1.0] * 6])  # packs of 6, 2, 2 and 2: half of the draws of two have the long one
    assert least_waiting(one_long, 4, 2) == pytest.approx(1 - 3 / 4)
    tiles, tokens = np.ones(6, int), np.full(6, 2)  # four packs of full budgets: 2, 2, 1 and 1 tiles
    whole = least_of_whole_tiles(tiles, tokens, (1.0, 0.0), 3, 4)
    assert least_waiting(tiles.astype(float), 4, 2, whole) == pytest.approx(1 - 1.5 / (11 / 6))
