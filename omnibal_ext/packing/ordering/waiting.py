"""Iterations while packs and samples change between them: who waits in each, and how far it is from the corpus.

Swaps of packs and of samples are judged alike: price x seconds waited longer + squared distances that grow.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints

ROUNDS, DEAREST, CHEAPER = 24, 10.0, 0.6  # the price of waiting falls from round to round


class Iterations(NamedTuple):
    """What iterations add up to; ranks are counted through all of them."""

    sums: Floats  # [I, F] features, less those of the mean iteration
    loads: Floats  # [I * D, parts] seconds; a mean rank has one in all
    highest: Floats  # [I, parts, 2] seconds of the fullest rank, and of the next
    fullest: Ints  # [I, parts] rank


def iterations_of(costs: Floats, features: Floats, dealt: Ints) -> Iterations:
    """Add up the packs of each iteration.

    Args:
        costs: seconds of each pack, [P, parts]; those of a mean rank are one.
        features: of each pack, [P, F], of mean 0.
        dealt: pack numbers, [I, D, M].
    """
    count, parts = len(dealt), costs.shape[1]
    loads = costs[dealt].sum(axis=2).reshape(-1, parts)
    highest, fullest = np.zeros((count, parts, 2)), np.zeros((count, parts), np.int64)
    iterations = Iterations(features[dealt].sum(axis=(1, 2)), loads, highest, fullest)
    _find_all(iterations)
    return iterations


def waited(iterations: Iterations) -> float:
    """Return what a mean rank waits, in all iterations and parts."""
    each = iterations.loads.reshape(len(iterations.sums), -1, iterations.loads.shape[1])
    return float((iterations.highest[:, :, 0] - each.mean(axis=1)).sum())


def most_to_wait(share: float, iterations: Iterations) -> float:
    """Return what a mean rank may wait in all, so that it is a `share` of the time."""
    return share / (1 - share) * len(iterations.sums)


def falling_prices(iterations: Iterations, allowed: float) -> Iterator[float]:
    """Yield what a second of waiting costs in squared features, round by round: what brings most for it comes first."""
    price = DEAREST * float((iterations.sums**2).sum()) / max(allowed, 1e-12)
    for _ in range(ROUNDS):
        yield price
        price *= CHEAPER


@numba.njit(cache=True)
def change_of_swap(
    iterations: Iterations, here: int, there: int, costs: Floats, features: Floats, gone: int, come: int
) -> tuple[float, float]:
    """Say what it does to let `gone` go from the rank `here` to the rank `there`, of another iteration, for `come`.

    Returns:
        By how much the squared distances from the mean grow, and the seconds waited.
    """
    ranks = len(iterations.loads) // len(iterations.sums)
    first, second = here // ranks, there // ranks
    further = 0.0
    for feature in range(features.shape[1]):
        moved = features[come, feature] - features[gone, feature]
        further += 2 * moved * (iterations.sums[first, feature] - iterations.sums[second, feature] + moved)
    longer = _grows(iterations, first, here, costs, gone, come) + _grows(iterations, second, there, costs, come, gone)
    return further, longer


@numba.njit(cache=True)
def swap(iterations: Iterations, here: int, there: int, costs: Floats, features: Floats, gone: int, come: int) -> None:
    """Let `gone` go from the rank `here` to the rank `there` for `come`."""
    ranks = len(iterations.loads) // len(iterations.sums)
    for rank, sign in ((here, 1), (there, -1)):
        for part in range(costs.shape[1]):
            iterations.loads[rank, part] += sign * (costs[come, part] - costs[gone, part])
        for feature in range(features.shape[1]):
            iterations.sums[rank // ranks, feature] += sign * (features[come, feature] - features[gone, feature])
        _find_fullest(iterations, rank // ranks)


@numba.njit(cache=True)
def _grows(iterations: Iterations, number: int, rank: int, costs: Floats, gone: int, come: int) -> float:
    """Return by how much the fullest ranks of an iteration grow, in all parts, if one thing makes way for another."""
    more = 0.0
    for part in range(costs.shape[1]):
        others = iterations.highest[number, part, 1 if iterations.fullest[number, part] == rank else 0]
        own = iterations.loads[rank, part] + costs[come, part] - costs[gone, part]
        more += max(others, own) - iterations.highest[number, part, 0]
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
