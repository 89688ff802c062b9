"""Iterations while packs and samples change between them: how far each is from the corpus, and who waits in it."""

from collections.abc import Iterator
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.mix import change_of_squares

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ROUNDS, DEAREST, CHEAPER = 24, 10.0, 0.6  # the price of waiting falls from round to round


class Iterations(NamedTuple):
    """What iterations add up to."""

    sums: Floats  # [I, F] features, less those of the mean iteration
    loads: Floats  # [I, D, parts] seconds; a mean rank has one in all
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
    iterations = Iterations(
        features[dealt].sum(axis=(1, 2)),
        costs[dealt].sum(axis=2),
        np.zeros((count, parts, 2)),
        np.zeros((count, parts), np.int64),
    )
    _find_all(iterations)
    return iterations


def waited(iterations: Iterations) -> float:
    """Return what a mean rank waits, in all iterations and parts."""
    return float((iterations.highest[:, :, 0] - iterations.loads.mean(axis=1)).sum())


def most_to_wait(share: float, iterations: Iterations) -> float:
    """Return what a mean rank may wait in all, so that it is a `share` of the time."""
    return share / (1 - share) * len(iterations.loads)


def falling_prices(iterations: Iterations, allowed: float) -> Iterator[float]:
    """Yield what a second of waiting costs in squared features, round by round: what brings most for it comes first."""
    price = DEAREST * float((iterations.sums**2).sum()) / allowed
    for _ in range(ROUNDS):
        yield price
        price *= CHEAPER


@numba.njit(cache=True)
def waited_longer(iterations: Iterations, number: int, rank: int, costs: Floats, gone: int, come: int) -> float:
    """Return by how much the fullest ranks of an iteration grow, in all parts, if one thing of `costs` makes way."""
    more = 0.0
    for part in range(costs.shape[1]):
        others = iterations.highest[number, part, 1 if iterations.fullest[number, part] == rank else 0]
        own = iterations.loads[number, rank, part] + costs[come, part] - costs[gone, part]
        more += max(others, own) - iterations.highest[number, part, 0]
    return more


@numba.njit(cache=True)
def further(iterations: Iterations, here: int, there: int, features: Floats, gone: int, come: int) -> float:
    """Return what two iterations' squares of features grow by if what is `gone` here goes there, for what has come."""
    return 2 * change_of_squares(features, iterations.sums, here, there, gone, come)


@numba.njit(cache=True)
def replace(
    iterations: Iterations, number: int, rank: int, costs: Floats, features: Floats, gone: int, come: int
) -> None:
    """Let one thing on a rank make way for another one."""
    for part in range(costs.shape[1]):
        iterations.loads[number, rank, part] += costs[come, part] - costs[gone, part]
    for feature in range(features.shape[1]):
        iterations.sums[number, feature] += features[come, feature] - features[gone, feature]
    _find_fullest(iterations, number)


@numba.njit(cache=True)
def _find_all(iterations: Iterations) -> None:
    for number in range(len(iterations.loads)):
        _find_fullest(iterations, number)


@numba.njit(cache=True)
def _find_fullest(iterations: Iterations, number: int) -> None:
    for part in range(iterations.loads.shape[2]):
        top, following, fullest = -1.0, -1.0, 0
        for rank in range(iterations.loads.shape[1]):
            load = iterations.loads[number, rank, part]
            if load > top:
                top, following, fullest = load, top, rank
            elif load > following:
                following = load
        iterations.highest[number, part, 0], iterations.highest[number, part, 1] = top, following
        iterations.fullest[number, part] = fullest
