"""The bound on iterations of all packs holds for every cut of a few samples, and says something."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest

from benchmarks.packing_limits import counting, least_spread, problem_of
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.level import WAIT_ENOUGH
from omnibal_ext.sizes import Sizes

COSTS = PackCosts({"vision": {"tiles": 3.0}, "language": {"tokens": 1.0, "attention": 0.02, "pack": 0.5}})
Sample = tuple[int, int]
Counted = tuple[float, float]  # what a tile counts, and what the seconds of a mean pack do
TILES, SECONDS = (1.0, 0.0), (0.0, 1.0)


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
    """All ways to run packs two at a time."""
    if not packs:
        yield []
    for other in packs[1:]:
        for rest in orders([pack for pack in packs[1:] if pack != other]):
            yield [(packs[0], other), *rest]


def least_of_all(samples: list[Sample], packs: int, budgets: tuple[int, int], counted: Counted = TILES) -> float:
    """Spread of a sum in iterations' means: so much a tile, and so much for the seconds of a mean pack."""
    least = np.inf
    for cut in cuts(samples, packs, budgets):
        costs, tiles = [seconds(pack) for pack in cut], [sum(sample[0] for sample in pack) for pack in cut]
        values = counted[0] * np.array(tiles) + counted[1] * np.array(costs) / np.mean(costs)
        for order in orders(list(range(packs))):
            dearest = sum(2 * max(costs[a], costs[b]) for a, b in order)
            if 1 - sum(costs) / dearest <= WAIT_ENOUGH:
                squares = [((values[a] + values[b]) / 2 - values.mean()) ** 2 for a, b in order]
                least = min(least, sum(squares) / len(squares))
    return float(np.sqrt(least))


def bound(samples: list[Sample], packs: int, budgets: tuple[int, int], counted: Counted = TILES) -> float:
    sizes = Sizes.from_arrays(np.array([tiles for tiles, _ in samples]), np.array([tokens for _, tokens in samples]))
    problem = counting(problem_of(sizes, budgets, COSTS, packs, 1), *counted, near=1.0 if counted == TILES else 0.1)
    types = sorted(set(samples))
    patterns = {tuple(sorted(types.index(sample) for sample in pack)) for pack in next(cuts(samples, packs, budgets))}
    return least_spread(problem, patterns)


@pytest.mark.parametrize("counted", [TILES, SECONDS, (0.1, 1.0)])
@pytest.mark.parametrize("seed", range(12))
def test_no_cut_and_no_order_of_few_samples_is_below_the_bound(seed: int, counted: Counted) -> None:
    generator = np.random.default_rng(seed)
    pairs = [(int(generator.integers(0, 4)), int(generator.integers(2, 7))) for _ in range(4)]
    samples = [sample for sample in pairs for _ in (0, 1)]  # each twice: some order keeps nobody waiting
    assert bound(samples, 4, (8, 12), counted) <= least_of_all(samples, 4, (8, 12), counted) + 1e-9


def test_packs_of_one_sample_run_with_their_like() -> None:
    """Nothing else fits: iterations have 1 or 3 tiles, but for what little may be waited."""
    samples = [(1, 8), (1, 8), (3, 8), (3, 8)]
    assert least_of_all(samples, 4, (4, 8)) == 1.0
    assert 0.95 < bound(samples, 4, (4, 8)) <= 1.0
    differ = least_of_all(samples, 4, (4, 8), SECONDS)
    assert 0.93 * differ < bound(samples, 4, (4, 8), SECONDS) <= differ


def test_packs_that_can_be_alike_have_no_bound() -> None:
    samples = [(1, 4), (1, 4), (3, 4), (3, 4)]
    assert least_of_all(samples, 2, (4, 8)) == 0.0
    assert bound(samples, 2, (4, 8)) == pytest.approx(0.0, abs=1e-3)
