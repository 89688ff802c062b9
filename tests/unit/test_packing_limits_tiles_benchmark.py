"""The bound on iterations of several packs a rank: never above what an order reaches, as high where that is known."""

from itertools import permutations

import numpy as np
import pytest

from benchmarks.packing_limits_tiles import Problem, few_tiles, least_square
from omnibal_ext.sizes import Sizes

FULL = 4  # tiles of a pack
RANKS, MICRO_BATCHES = 2, 2


def problem(tiles: list[int], waiting: float) -> Problem:
    """Packs of these tiles, all of which run; `waiting` tiles an iteration."""
    lacking, counts = np.unique([FULL - t for t in tiles if t < FULL], return_counts=True)
    iterations = len(tiles) / (RANKS * MICRO_BATCHES)
    most, mean = FULL * MICRO_BATCHES, sum(tiles) / iterations
    return Problem(RANKS, most, lacking, counts / iterations, 0.0, mean, 0.0, 0.0, waiting)


@pytest.mark.parametrize(("waiting", "least"), [(0.0, 16.0), (2.0, 8.0), (4.0, 0.0)])
def test_packs_without_tiles_stand_beside_each_other_or_keep_ranks_waiting(waiting: float, least: float) -> None:
    """One pack in four has no tiles. Where nobody waits, half of the iterations have one on each rank and 8 tiles, the
    others 16; where 4 tiles are waited for in each iteration, all have 12; half of them, with half the waiting."""
    assert least_square(problem([0] * 4 + [FULL] * 12, waiting)) == pytest.approx(least, abs=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_eight_packs_is_below_the_bound(seed: int) -> None:
    """Every order of packs that have few tiles or are full, with whatever waiting it takes."""
    generator = np.random.default_rng(seed)
    tiles = generator.choice([0, 1, 2, 3, FULL], 8, p=[0.15, 0.1, 0.1, 0.15, 0.5])
    orders = np.array(sorted({tuple(order) for order in permutations(tiles.tolist())}))
    ranks = orders.reshape(-1, 2, RANKS, MICRO_BATCHES).sum(axis=3)
    squares = ((ranks.sum(axis=2) - tiles.sum() / 2) ** 2).mean(axis=1)
    waiting = (ranks.max(axis=2) * RANKS - ranks.sum(axis=2)).mean(axis=1)
    for allowed in np.unique(waiting):
        reached = squares[waiting <= allowed].min()
        bound = least_square(problem(tiles.tolist(), float(allowed)))
        assert bound <= reached + 1e-6


def test_a_sample_over_half_a_pack_leaves_room_for_so_many_tiles() -> None:
    """A tile takes 100 tokens at least: 600 tokens leave room for four. Two of 500 may share one: not counted."""
    sizes = Sizes.from_arrays([1, 2, 0, 0, 1, 0], [100, 260, 600, 950, 501, 500])
    assert few_tiles(sizes, 6, 1000).tolist() == [1, 0, 0, 0, 1, 1]
