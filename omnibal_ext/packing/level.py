"""The order of packs: iterations in which no rank waits (level), and each of which looks like the corpus (mixed).

    row        one pack for each data-parallel rank, alike in seconds
    iteration  M rows from different parts of the corpus

Rows of alike packs keep ranks level; unlike rows make an iteration teach what a random one teaches, with less noise.
Loops run so many steps as the sizes say, never so many as a clock says: the same seed gives the same order anywhere.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.deal import deal_level, stored_order
from omnibal_ext.packing.lift import lift
from omnibal_ext.packing.metrics import rank_loads, wait
from omnibal_ext.packing.mix import mixed_iterations
from omnibal_ext.packing.rows import halve
from omnibal_ext.packing.trade import trade

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WAIT_ENOUGH = 0.003  # share of time spent waiting; of orders that wait for less, the one that mixes most is taken
WAIT_TO_SPEND = 0.0028  # of it for mixing; an epoch's last iteration, of what is left, may wait for longer
STEPS_A_SECOND = 4_000_000  # swaps looked at


class Way(NamedTuple):
    """How iterations are made."""

    rows: bool  # rows stay together, so that fewer orders are possible, and all of them level
    unlike: float  # share of time that ranks would wait for packs of one leaf, were they not dealt level
    lifted: float = 0.0  # share of what may be waited that is spent on packs among dearer ones at once


# The first ways mix most, the last one waits least.
WAYS = (
    (Way(rows=False, unlike=0.005),),
    (Way(rows=True, unlike=0.005), Way(rows=True, unlike=0.001, lifted=0.9)),
    (Way(rows=True, unlike=0.0025),),
    (Way(rows=True, unlike=0.0),),
)
LESS, LEAST_LIFTED = 0.05, 0.4  # where lifting makes ranks wait too long, so much less is lifted, and what was too long
LIGHTEST = 0.25  # weight of a feature that hardly differs between iterations; the one that differs most has 1


def order_packs(
    seconds: Floats,
    features: Floats,
    data_parallel_size: int,
    micro_batches: int,
    seed: int,
    effort: float = 1.0,
    together: NDArray[np.bool_] | None = None,
) -> Ints:
    """Order packs by iteration; `deal.deal` gives each rank its own.

    1. Set packs aside at even steps from cheap to dear, so many that the others fill iterations; they come last.
    2. Halve the others at the part whose seconds spread most, down to leaves that cost as good as the same; some packs
       as if they cost what dearer ones do (`lift`).
    3. Make iterations of rows (or single packs) from stretches of this order; swap rows between iterations, then packs
       of one leaf, until each iteration is near the mean in all features.
    4. Deal the packs of each iteration so that the ranks' sums are level in every part. Swap packs between iterations
       again, as long as that brings more mixing than waiting, and little waiting in all (`trade`).
    5. Do 2 to 4 in the ways of `WAYS`, each of which gives most weight to what the one before mixed worst, until some
       leave next to no waiting. Take the one of them that mixes most, where the worst counts most (the sum of fourth
       powers); else the one that leaves least waiting.
    6. Shuffle the iterations.

    Args:
        seconds: of each pack, [P, parts]; ranks wait for the fullest one of each part.
        features: of each pack, [P, F]; what is to be spread over the iterations, scaled to equal importance.
        effort: nominal seconds for the swaps, in each way.
        together: packs that are not set aside, if the others suffice, [P].

    Returns:
        Pack numbers [P].
    """
    batch = data_parallel_size * micro_batches
    iterations = len(seconds) // batch
    by_cost = np.argsort(seconds.sum(axis=1), kind="stable")
    aside, others = _set_aside(by_cost, len(seconds) - iterations * batch, together)
    if iterations == 0:
        return aside
    others = np.random.default_rng(seed).permutation(others)
    shape = data_parallel_size, micro_batches
    best, least, weights = others[None], (math.inf, math.inf), np.ones(features.shape[1])
    for ways in WAYS:
        left = list(ways)
        while left:
            way = left.pop(0)
            dealt = _iterations(seconds, features * weights, others, shape, way, seed, effort)
            too_long = max(0.0, wait(rank_loads(dealt, seconds)) - WAIT_ENOUGH)
            squares = (features[dealt].sum(axis=(1, 2)) ** 2).sum(axis=0)
            spread = float((squares**2).sum())
            if (too_long, spread) < least:
                best, least = stored_order(dealt), (too_long, spread)
            less = way.lifted - too_long / WAIT_TO_SPEND - LESS
            if too_long > 0 and less > LEAST_LIFTED:
                left.append(way._replace(lifted=less))
            weights = np.maximum(LIGHTEST, np.sqrt(squares / max(1e-12, squares.max(initial=0.0))))
        if least[0] == 0:
            break
    return np.concatenate([np.random.default_rng((seed, 1)).permutation(best).ravel(), aside])


def _iterations(
    seconds: Floats, features: Floats, packs: Ints, shape: tuple[int, int], way: Way, seed: int, effort: float
) -> Ints:
    """Make iterations of D ranks x M microbatches of all `packs`, in one way; return them dealt, [I, D, M]."""
    ranks, micro_batches = shape
    # The fullest of D ranks is sqrt(2 ln D) deviations above the mean or less; one deviation is 1.25 mean distances.
    share = way.unlike * micro_batches / (1.25 * math.sqrt(2 * math.log(max(2, ranks))))
    order, width = packs.copy(), ranks if way.rows else 1
    unlike = share * float(seconds.sum(axis=1).mean())
    lifted = lift(seconds, features, packs, unlike, way.lifted * WAIT_TO_SPEND, seed, effort)
    leaves = halve(np.ascontiguousarray(lifted.T), order, width, unlike)
    iterations = len(packs) // (ranks * micro_batches)
    steps = int(effort * STEPS_A_SECOND)
    groups = mixed_iterations(features, order, leaves, width, iterations, seed, steps)
    return trade(seconds, features, deal_level(seconds, groups, ranks), WAIT_TO_SPEND, seed, effort)


def _set_aside(by_cost: Ints, count: int, together: NDArray[np.bool_] | None) -> tuple[Ints, Ints]:
    """Take `count` packs at even steps, the first one included; return them and the others."""
    free = np.ones(len(by_cost), np.bool_) if together is None else ~together[by_cost]
    if np.count_nonzero(free) < count:
        free[:] = True
    places = np.flatnonzero(free)
    apart = np.zeros(len(by_cost), np.bool_)
    apart[places[np.arange(count) * len(places) // max(1, count)]] = True
    return by_cost[apart], by_cost[~apart]
