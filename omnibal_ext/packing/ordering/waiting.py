"""Sums of iterations while packs or samples are swapped: how long ranks wait, and how far each is from the corpus.

A swap's cost is price x added seconds of waiting + growth of the squared distances from the mean iteration.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints

ROUNDS, DEAREST, CHEAPER = 24, 10.0, 0.6  # the price of waiting falls from round to round


class Iterations(NamedTuple):
    """Sums of every iteration; ranks are numbered through all iterations."""

    sums: Floats  # [I, F] features minus their mean over iterations
    loads: Floats  # [I * D, parts] seconds; the mean rank's sum over parts is 1
    highest: Floats  # [I, parts, 2] seconds of the slowest rank and of the second slowest
    fullest: Ints  # [I, parts] slowest rank


def iterations_of(costs: Floats, features: Floats, slots: Ints) -> Iterations:
    """Sum up the packs of each iteration.

    Args:
        costs: seconds of each pack, [P, parts], scaled so that a mean rank has 1.
        features: of each pack, [P, F], of mean 0.
        slots: pack numbers, [I, D, M].
    """
    count, parts = len(slots), costs.shape[1]
    loads = costs[slots].sum(axis=2).reshape(-1, parts)
    highest, fullest = np.zeros((count, parts, 2)), np.zeros((count, parts), np.int64)
    iterations = Iterations(features[slots].sum(axis=(1, 2)), loads, highest, fullest)
    _find_all(iterations)
    return iterations


def waited(iterations: Iterations) -> float:
    """Return the seconds a mean rank waits, summed over iterations and parts."""
    each = iterations.loads.reshape(len(iterations.sums), -1, iterations.loads.shape[1])
    return float((iterations.highest[:, :, 0] - each.mean(axis=1)).sum())


def allowed_wait(fraction: float, iterations: Iterations) -> float:
    """Return the seconds a mean rank may wait in total, so that waiting is `fraction` of the time."""
    return fraction / (1 - fraction) * len(iterations.sums)


def falling_prices(iterations: Iterations, allowed: float) -> Iterator[float]:
    """Yield the price of a second's waiting for each round, in squared feature distance.

    It falls, so that swaps which gain most per second come first.
    """
    price = DEAREST * float((iterations.sums**2).sum()) / max(allowed, 1e-12)
    for _ in range(ROUNDS):
        yield price
        price *= CHEAPER


@numba.njit(cache=True)
def change_of_swap(
    iterations: Iterations, here: int, there: int, costs: Floats, features: Floats, old: int, new: int
) -> tuple[float, float]:
    """Evaluate exchanging `old` on rank `here` for `new` on rank `there`, of another iteration.

    Returns:
        Growth of the squared distances from the mean, and of the seconds waited.
    """
    ranks = len(iterations.loads) // len(iterations.sums)
    first, second = here // ranks, there // ranks
    further = 0.0
    for feature in range(features.shape[1]):
        moved = features[new, feature] - features[old, feature]
        further += 2 * moved * (iterations.sums[first, feature] - iterations.sums[second, feature] + moved)
    longer = _grows(iterations, first, here, costs, old, new) + _grows(iterations, second, there, costs, new, old)
    return further, longer


@numba.njit(cache=True)
def swap(iterations: Iterations, here: int, there: int, costs: Floats, features: Floats, old: int, new: int) -> None:
    """Exchange `old` on rank `here` for `new` on rank `there`, in place."""
    ranks = len(iterations.loads) // len(iterations.sums)
    for rank, sign in ((here, 1), (there, -1)):
        for part in range(costs.shape[1]):
            iterations.loads[rank, part] += sign * (costs[new, part] - costs[old, part])
        for feature in range(features.shape[1]):
            iterations.sums[rank // ranks, feature] += sign * (features[new, feature] - features[old, feature])
        _find_fullest(iterations, rank // ranks)


@numba.njit(cache=True)
def _grows(iterations: Iterations, number: int, rank: int, costs: Floats, old: int, new: int) -> float:
    """Return how much longer the iteration's slowest ranks take, summed over parts, if `new` replaces `old`."""
    more = 0.0
    for part in range(costs.shape[1]):
        others = iterations.highest[number, part, 1 if iterations.fullest[number, part] == rank else 0]
        rank_seconds = iterations.loads[rank, part] + costs[new, part] - costs[old, part]
        more += max(others, rank_seconds) - iterations.highest[number, part, 0]
    return more


@numba.njit(cache=True)
def _find_all(iterations: Iterations) -> None:
    for number in range(len(iterations.sums)):
        _find_fullest(iterations, number)


@numba.njit(cache=True)
def _find_fullest(iterations: Iterations, number: int) -> None:
    ranks = len(iterations.loads) // len(iterations.sums)
    for part in range(iterations.loads.shape[1]):
        top, following, fullest = -1.0, -1.0, 0
        for rank in range(number * ranks, (number + 1) * ranks):
            load = iterations.loads[rank, part]
            if load > top:
                top, following, fullest = load, top, rank
            elif load > following:
                following = load
        iterations.highest[number, part, 0], iterations.highest[number, part, 1] = top, following
        iterations.fullest[number, part] = fullest
