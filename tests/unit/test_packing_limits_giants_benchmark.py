"""The bound on iterations with giants: never above what an order reaches, and as high where that is known."""

from itertools import permutations

import numpy as np
import pytest

from benchmarks.packing_limits_giants import Problem, least_square


@pytest.mark.parametrize(
    ("waiting", "least"),
    [
        pytest.param(0.0, 3.0, id="giants run beside each other: one iteration in four has two, that is four means"),
        pytest.param(0.25, 2.0, id="half of those have one giant, and wait for half a second"),
        pytest.param(0.5, 1.0, id="no iteration needs more than one"),
    ],
)
def test_giants_run_beside_each_other_or_keep_ranks_waiting(waiting: float, least: float) -> None:
    """One pack in four is a giant, all others are nothing, two ranks: means of half a giant, of one second."""
    problem = Problem(2, 1, (0.5, 0.5), (2.0, 2.0), (0.0, 0.0), 0.5, 0.0, waiting)
    assert least_square(problem) == pytest.approx(least, abs=2e-3)


def test_tiles_that_other_packs_have_more_make_up_for_giants() -> None:
    """They take as long as what a giant has more: nobody waits, so each iteration may have one, or none."""
    problem = Problem(2, 1, (0.5, 0.5), (2.0, 2.0), (0.0, 0.0), 0.5, 1.0, 0.0)
    assert least_square(problem) == pytest.approx(1.0, abs=2e-3)


@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_eight_packs_is_below_the_bound(seed: int) -> None:
    """Every order of packs of which some hold a giant, on two ranks of two, with whatever waiting it takes."""
    generator = np.random.default_rng(seed)
    giant = generator.random(8) < 0.4
    giant[0], giant[1] = True, False
    packs = np.where(giant, generator.uniform(8, 10, 8), generator.uniform(0, 1, 8))
    orders = np.array([order for order in permutations(range(8)) if order[0] == 0])
    ranks = packs[orders].reshape(-1, 2, 2, 2).sum(axis=3)
    mean = packs.sum() / 2
    squares = ((ranks.sum(axis=2) / mean - 1) ** 2).mean(axis=1)
    waiting = (2 * ranks.max(axis=2) - ranks.sum(axis=2)).mean(axis=1)
    count = giant.sum() / 2
    ends = packs[giant].min() / mean, packs[giant].max() / mean
    for allowed in np.unique(waiting.round(6))[::40]:
        problem = Problem(2, 2, (count, count), ends, (0.0, packs[~giant].max() / mean), mean, 0.0, allowed + 1e-6)
        assert least_square(problem) <= squares[waiting <= allowed + 1e-6].min() + 1e-9


def test_ranks_wait_for_the_giants_of_the_fullest() -> None:
    """On two ranks of two: one giant keeps the other rank waiting, three as well, two and four do not."""
    problem = Problem(2, 2, (1.0, 1.0), (3.0, 4.0), (0.0, 0.5), 1.0, 0.0, 0.0)
    assert problem.waited(0) == problem.waited(2) == problem.waited(4) == 0.0
    assert problem.waited(1) == pytest.approx(3.0 - 2 * 0.5)
    assert problem.waited(3) == pytest.approx(2 * 3.0 - (4.0 + 0.5))
