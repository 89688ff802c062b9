"""Groups that are alike: iterations that look like the corpus, of packs or ranks; ranks that are level, of packs."""

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.random_bits import below

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

STEPS_A_SECOND = 4_000_000  # swaps looked at
MOST_PAIRS = 256  # swaps of rows tried between two iterations at a time
QUIET = 4  # meetings without a swap, for each iteration, after which rows are as mixed as they get


def mixed_iterations(
    features: Floats, order: Ints, leaves: Ints, width: int, iterations: int, seed: int, steps: int
) -> Ints:
    """Group packs (or ranks) into iterations (or ranks), each near the mean in all features.

    1. Cut the rows, which stand in an order of likeness, into equal stretches; an iteration takes one of each.
    2. Swap rows between two iterations where that brings both nearer to the mean.
    3. Swap packs of one leaf, which may change places, between two iterations likewise.

    Args:
        features: of each pack, [P, F], of mean 0.
        order: pack numbers [I * M * D], rows of `width` packs one after the other, whole leaves one after the other.
        leaves: the first row of each leaf, and the number of rows.
        steps: swaps to look at, in all.

    Returns:
        Pack numbers [I, M * D].
    """
    rows = order.reshape(-1, width)
    units = np.arange(len(rows)).reshape(-1, iterations)
    units = np.random.default_rng((seed, 2)).permuted(units, axis=1).T.copy()
    sums = features[rows].sum(axis=1)[units].sum(axis=1)
    if units.shape[1] > 1:
        _swap_rows(features[rows].sum(axis=1), units, sums, seed, steps // 2)
    row_iteration = np.empty(len(rows), np.int64)
    row_iteration[units] = np.arange(iterations)[:, None]
    _swap_packs(features, order, leaves * width, np.repeat(row_iteration, width), sums, seed, steps)
    return rows[units].reshape(iterations, -1)


@numba.njit(cache=True)
def _swap_rows(features: Floats, units: Ints, sums: Floats, seed: int, steps: int) -> None:
    """Make the best swap of rows between two iterations that meet at random, until few meetings bring one."""
    iterations, size = units.shape
    pairs = min(size * size, MOST_PAIRS)
    quiet = 0
    for turn in range(max(iterations, steps // pairs)):
        if iterations < 2 or quiet > QUIET * iterations:
            break
        one = turn % iterations
        other = (one + 1 + below(iterations - 1, seed, turn)) % iterations
        best, best_i, best_j = -1e-9, -1, -1
        for pair in range(pairs):
            place = pair if pairs == size * size else below(size * size, seed + turn, pair)
            i, j = place // size, place % size
            change = change_of_squares(features, sums, one, other, units[one, i], units[other, j])
            if change < best:
                best, best_i, best_j = change, i, j
        quiet += 1
        if best_i >= 0:
            moved = features[units[other, best_j]] - features[units[one, best_i]]
            sums[one] += moved
            sums[other] -= moved
            units[one, best_i], units[other, best_j] = units[other, best_j], units[one, best_i]
            quiet = 0


@numba.njit(cache=True)
def _swap_packs(
    features: Floats, order: Ints, leaves: Ints, iteration: Ints, sums: Floats, seed: int, steps: int
) -> None:
    """Try each pack of a leaf against others of it, at random; `iteration` [P] is where each place of `order` runs."""
    rounds = max(1, steps // max(1, len(order)))
    for turn in range(rounds):
        for leaf in range(len(leaves) - 1):
            first, count = leaves[leaf], leaves[leaf + 1] - leaves[leaf]
            for i in range(first, first + count):
                j = first + below(count, seed + turn, i)
                one, other = iteration[i], iteration[j]
                if one == other:
                    continue
                if change_of_squares(features, sums, one, other, order[i], order[j]) < -1e-9:
                    moved = features[order[j]] - features[order[i]]
                    sums[one] += moved
                    sums[other] -= moved
                    order[i], order[j] = order[j], order[i]


@numba.njit(cache=True)
def change_of_squares(features: Floats, sums: Floats, one: int, other: int, here: int, there: int) -> float:
    """Return half of what a swap adds to two groups' squared distances from the mean."""
    change = 0.0
    for feature in range(features.shape[1]):
        moved = features[there, feature] - features[here, feature]
        change += moved * (sums[one, feature] - sums[other, feature] + moved)
    return change
