"""Packs that one rank runs in one iteration: as many for each, and together as near to the mean in seconds as can be.

packs    5 5 5 4 | 4 3 3 3        two microbatches a rank
ranks    5 3 | 5 3 | 5 3 | 4 4
"""

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.mix import STEPS_A_SECOND, mixed_iterations
from omnibal_ext.packing.rows import halve

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LEAST_STEPS = 64  # of a pack, however little time there is


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


def level_ranks(seconds: Floats, packs: Ints, micro_batches: int, seed: int, effort: float) -> Ints:
    """Deal `packs` to ranks, M to each, so that the ranks' sums are level in every part, as shares of its mean: [R, M].

    A rank takes a pack of each of M stretches of an order of likeness; then ranks swap packs.

    Args:
        seconds: of each pack, [P, parts].
        packs: R * M numbers.
        effort: nominal seconds; counts steps.
    """
    order = np.random.default_rng(seed).permutation(packs)
    if micro_batches == 1:
        return order[:, None]
    halve(np.ascontiguousarray(seconds.T), order, 1, 0.0)
    means, leaves = seconds[packs].mean(axis=0), np.array([0, len(packs)])
    beyond = (seconds - means) / np.where(means > 0, means, 1.0)
    steps = max(int(effort * STEPS_A_SECOND), LEAST_STEPS * len(packs))
    return mixed_iterations(beyond, order, leaves, 1, len(packs) // micro_batches, seed, steps)
