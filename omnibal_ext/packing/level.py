"""The order of packs: iterations in which no rank waits (level), and each of which looks like the corpus (mixed).

    rank       M packs, which make up for each other in seconds
    iteration  D ranks, alike in seconds, that together look like the corpus

Loops run so many steps as the sizes say, never so many as a clock says: the same seed gives the same order anywhere.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.lift import lift
from omnibal_ext.packing.metrics import rank_loads, wait
from omnibal_ext.packing.mix import STEPS_A_SECOND, mixed_iterations
from omnibal_ext.packing.rows import halve
from omnibal_ext.packing.trade import trade

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WAIT_ENOUGH = 0.003  # share of time spent waiting; of orders that wait for less, the one that mixes most is taken
WAIT_TO_SPEND = 0.0028  # of it for mixing; an epoch's last iteration, of what is left, may wait for longer


class Way(NamedTuple):
    """How iterations are made."""

    rows: bool  # an iteration is of ranks that are alike, so that fewer orders are possible, and all of them level
    unlike: float  # share of time that ranks of one leaf would wait for each other
    lifted: float = 0.0  # share of what may be waited that is spent on ranks among dearer ones at once


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
    seconds: Floats, features: Floats, ranks: Ints, data_parallel_size: int, seed: int, effort: float = 1.0
) -> Ints:
    """Order packs by iteration, so that ranks hardly wait, and iterations are near to the mean in all features.

    1. Halve the ranks at the part whose seconds spread most, down to leaves that cost as good as the same; some ranks
       as if they cost what dearer ones do (`lift`).
    2. Make iterations of ranks that are alike (or of any ranks); swap ranks of one leaf between them, until each is
       near the mean in all features. Swap ranks again, as long as that brings more mixing than waiting, and little
       waiting in all (`trade`).
    3. Do 1 and 2 in the ways of `WAYS`, each of which gives most weight to what the one before mixed worst, until some
       leave next to no waiting. Take the one of them that mixes most, where the worst counts most (the sum of fourth
       powers); else the one that leaves least waiting.
    4. Swap packs likewise, where ranks run several. Shuffle the iterations.

    Args:
        seconds: of each pack, [P, parts]; ranks wait for the fullest one of each part.
        features: of each pack, [P, F]; what is to be spread over the iterations, scaled to equal importance.
        ranks: the packs of each rank, which fill iterations, [I * D, M].
        effort: nominal seconds for the swaps, in each way.

    Returns:
        Pack numbers [I, D, M].
    """
    iterations = _order_ranks(seconds[ranks].sum(axis=1), features[ranks].sum(axis=1), data_parallel_size, seed, effort)
    dealt = ranks[iterations]
    if ranks.shape[1] > 1:
        dealt = trade(seconds, features, dealt, WAIT_TO_SPEND, seed, effort)
    return np.random.default_rng((seed, 1)).permutation(dealt)


def _order_ranks(seconds: Floats, features: Floats, data_parallel_size: int, seed: int, effort: float) -> Ints:
    """Return the numbers of all ranks by iteration, [I, D], in the best of `WAYS`."""
    best = np.arange(len(seconds)).reshape(-1, data_parallel_size)
    least, weights = (math.inf, math.inf), np.ones(features.shape[1])
    for ways in WAYS:
        left = list(ways)
        while left:
            way = left.pop(0)
            dealt = _iterations(seconds, features * weights, data_parallel_size, way, seed, effort)
            too_long = max(0.0, wait(rank_loads(dealt, seconds)) - WAIT_ENOUGH)
            squares = (features[dealt].sum(axis=(1, 2)) ** 2).sum(axis=0)
            spread = float((squares**2).sum())
            if (too_long, spread) < least:
                best, least = dealt[:, :, 0], (too_long, spread)
            less = way.lifted - too_long / WAIT_TO_SPEND - LESS
            if too_long > 0 and less > LEAST_LIFTED:
                left.append(way._replace(lifted=less))
            weights = np.maximum(LIGHTEST, np.sqrt(squares / max(1e-12, squares.max(initial=0.0))))
        if least[0] == 0:
            break
    return best


def _iterations(seconds: Floats, features: Floats, data_parallel_size: int, way: Way, seed: int, effort: float) -> Ints:
    """Make iterations of all ranks, in one way, [I, D, 1]."""
    # The fullest of D ranks is sqrt(2 ln D) deviations above the mean or less; one deviation is 1.25 mean distances.
    share = way.unlike / (1.25 * math.sqrt(2 * math.log(max(2, data_parallel_size))))
    order, width = np.arange(len(seconds)), data_parallel_size if way.rows else 1
    unlike = share * float(seconds.sum(axis=1).mean())
    lifted = lift(seconds, features, order, unlike, way.lifted * WAIT_TO_SPEND, seed, effort)
    leaves = halve(np.ascontiguousarray(lifted.T), order, width, unlike)
    steps = int(effort * STEPS_A_SECOND)
    groups = mixed_iterations(features, order, leaves, width, len(order) // data_parallel_size, seed, steps)
    return trade(seconds, features, groups[:, :, None], WAIT_TO_SPEND, seed, effort)
