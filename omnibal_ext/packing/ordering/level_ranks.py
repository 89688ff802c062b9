"""Packs that one rank runs in one iteration: as many for each, and together as near to the mean in seconds as can be.

packs    5 5 5 4 | 4 3 3 3        two microbatches a rank
ranks    5 3 | 5 3 | 5 3 | 4 4
"""

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.kd_tree import halve
from omnibal_ext.packing.random_bits import below

SWAPS_A_SECOND = 4_000_000  # looked at
LEAST_SWAPS = 32  # of a pack, however little time there is


def set_aside(seconds: Floats, count: int, together: NDArray[np.bool_] | None = None) -> tuple[Ints, Ints]:
    """Take `count` packs at even steps from cheap to dear, the first one included; return them and the others.

    Args:
        seconds: of each pack, [P, parts].
        together: packs that are not taken, if the others suffice, [P].
    """
    by_cost = np.argsort(seconds.sum(axis=1), kind="stable")
    free = np.ones(len(by_cost), np.bool_) if together is None else ~together[by_cost]
    if np.count_nonzero(free) < count:
        free[:] = True
    places = np.flatnonzero(free)
    apart = np.zeros(len(by_cost), np.bool_)
    apart[places[np.arange(count) * len(places) // max(1, count)]] = True
    return by_cost[apart], by_cost[~apart]


def level_ranks(seconds: Floats, micro_batches: int, seed: int, effort: float) -> Ints:
    """Deal packs to ranks, M to each, so that the ranks' sums are level in every part, as shares of its mean: [R, M].

    1. A rank takes a pack of each of M stretches of an order of likeness.
    2. Each pack in turn meets another one, drawn at random; they change ranks where that brings both nearer to level.

    Args:
        seconds: of each pack, [R * M, parts].
        effort: nominal seconds; counts steps.
    """
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(seconds))
    if micro_batches == 1:
        return order[:, None]
    halve(np.ascontiguousarray(seconds.T), order, 1, 0.0)
    means = seconds.mean(axis=0)
    beyond = (seconds - means) / np.where(means > 0, means, 1.0)
    slots = generator.permuted(order.reshape(micro_batches, -1), axis=1).T.ravel().copy()
    rounds = max(int(effort * SWAPS_A_SECOND) // len(seconds), LEAST_SWAPS)
    _swap(beyond, slots, beyond[slots.reshape(-1, micro_batches)].sum(axis=1), micro_batches, seed, rounds)
    return slots.reshape(-1, micro_batches)


@numba.njit(cache=True)
def _swap(beyond: Floats, slots: Ints, sums: Floats, micro_batches: int, seed: int, rounds: int) -> None:
    """Swap packs of two ranks; `slots` [R * M] has the packs, `sums` [R, parts] what ranks have beyond the mean."""
    for turn in range(rounds):
        for here in range(len(slots)):
            there = below(len(slots), seed + turn, here)
            one, other = here // micro_batches, there // micro_batches
            if one == other:
                continue
            change = 0.0
            for part in range(beyond.shape[1]):
                moved = beyond[slots[there], part] - beyond[slots[here], part]
                change += moved * (sums[one, part] - sums[other, part] + moved)
            if change < -1e-12:
                for part in range(beyond.shape[1]):
                    moved = beyond[slots[there], part] - beyond[slots[here], part]
                    sums[one, part] += moved
                    sums[other, part] -= moved
                slots[here], slots[there] = slots[there], slots[here]
