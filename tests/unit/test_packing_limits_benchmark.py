"""The bound on iterations of all packs holds for every cut of a few samples, and says something."""

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest

from benchmarks.packing_limits import least_spread, patterns_of, placed, problem_of
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.options import WAIT
from omnibal_ext.packing.packs import PackList
from omnibal_ext.sizes import Sizes
from tests.long import short

COSTS = PackCosts({"vision": {"tiles": 3.0}, "language": {"tokens": 1.0, "attention": 0.02, "pack": 0.5}})
Sample = tuple[int, int]
Deviations = tuple[float, float, float]  # of tiles, tokens and squared tokens, that count as one
NOT = float("inf")
TILES, TOKENS, ALL = (1.0, NOT, NOT), (NOT, 1.0, NOT), (1.0, 1.5, 12.0)


def seconds(pack: list[Sample]) -> float:
    return 0.5 + sum(3.0 * tiles + tokens + 0.02 * tokens**2 for tiles, tokens in pack)


def cuts(samples: list[Sample], packs: int, budgets: tuple[int, int]) -> Iterator[list[list[Sample]]]:
    """All ways to put samples into so many packs that none of them is empty or over budget."""
    if not samples:
        if packs == 0:
            yield []
        return
    for count in range(len(samples)):
        for others in combinations(range(1, len(samples)), count):
            pack = [samples[0], *(samples[i] for i in others)]
            if any(sum(sample[size] for sample in pack) > budgets[size] for size in (0, 1)):
                continue
            left = [sample for i, sample in enumerate(samples) if i > 0 and i not in others]
            for rest in cuts(left, packs - 1, budgets):
                yield [pack, *rest]


def orders(packs: list[int]) -> Iterator[list[tuple[int, int]]]:
    if not packs:
        yield []
    for other in packs[1:]:
        for rest in orders([pack for pack in packs[1:] if pack != other]):
            yield [(packs[0], other), *rest]


def all_ways(
    samples: list[Sample], packs: int, budgets: tuple[int, int], deviations: Deviations
) -> Iterator[tuple[float, list[list[Sample]]]]:
    """Spread of iterations' means, of the size that spreads most, of every cut in every order that waits little."""
    for cut in cuts(samples, packs, budgets):
        costs = [seconds(pack) for pack in cut]
        sums = np.array([[sum(part) for part in zip(*((t, n, n * n) for t, n in pack), strict=True)] for pack in cut])
        for order in orders(list(range(packs))):
            dearest = sum(2 * max(costs[a], costs[b]) for a, b in order)
            if 1 - sum(costs) / dearest <= WAIT:
                means = np.array([(sums[a] + sums[b]) / 2 for a, b in order])
                yield (means.std(axis=0) / deviations).max(), [cut[pack] for pair in order for pack in pair]


def bound(samples: list[Sample], way: list[list[Sample]], budgets: tuple[int, int], deviations: Deviations) -> float:
    sizes = Sizes.from_arrays(np.array([tiles for tiles, _ in samples]), np.array([tokens for _, tokens in samples]))
    left, ids = list(range(len(samples))), []
    for sample in (sample for pack in way for sample in pack):
        ids.append(next(number for number in left if samples[number] == sample))
        left.remove(ids[-1])
    packs = PackList(np.cumsum([0, *map(len, way)]), np.array(ids))
    assert all(a < b for a, b in pairwise(packs.pack_offsets.tolist()))
    problem = problem_of(sizes, budgets, COSTS, packs, 1, 0.001, np.array(deviations))
    return least_spread(problem, placed(problem, patterns_of(packs, sizes, problem, 1), 2))


@pytest.mark.parametrize("deviations", [TILES, TOKENS, ALL])
@pytest.mark.parametrize("seed", short(range(12), range(2)))
def test_no_cut_and_no_order_of_few_samples_is_below_the_bound(seed: int, deviations: Deviations) -> None:
    generator = np.random.default_rng(seed)
    pairs = [(int(generator.integers(0, 4)), int(generator.integers(2, 7))) for _ in range(4)]
    samples = [sample for sample in pairs for _ in (0, 1)]  # each twice: some order keeps nobody waiting
    ways = list(all_ways(samples, 4, (8, 12), deviations))
    for _, way in (min(ways), max(ways)):
        assert bound(samples, way, (8, 12), deviations) <= min(ways)[0] + 1e-9


def test_better_packs_are_found() -> None:
    """Each long text goes with a short one: with the tile or without it, in packs of 1 and 4 tiles, or of 2 and 3."""
    samples = [(1, 8), (1, 8), (3, 8), (3, 8), (0, 2), (0, 2), (1, 2), (1, 2)]
    ways = list(all_ways(samples, 4, (5, 10), TILES))
    assert (min(ways)[0], max(ways)[0]) == (0.5, 1.5)
    assert 0.45 < bound(samples, max(ways)[1], (5, 10), TILES) <= 0.5
