"""The order of packs: iterations in which ranks hardly wait, and each of which looks like the corpus.

    rank       M packs, which make up for each other in seconds
    iteration  D ranks, alike in seconds, that together look like the corpus

Loops run so many steps as the sizes say, never so many as a clock says: the same seed gives the same order anywhere.
"""

import math

import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.kd_tree import halve
from omnibal_ext.packing.ordering.metrics import wait
from omnibal_ext.packing.ordering.swap_packs import swap_packs

UNLIKE = 0.005, 0.001, 0.0  # share of time that ranks which stand for each other would wait; tried in turn
SPENT = 0.95  # of what may be waited: samples that change places have the rest


def order_iterations(
    seconds: Floats,
    features: Floats,
    ranks: Ints,
    data_parallel_size: int,
    limit: float,
    seed: int,
    effort: float = 1.0,
) -> Ints:
    """Order packs by iteration, so that ranks hardly wait, and iterations are near to the mean in all features.

    1. Sort the ranks by likeness: a k-d tree halves them at the part whose seconds spread most, down to leaves that
       cost as good as the same. Shuffle each leaf; D ranks that follow each other are an iteration.
    2. Swap ranks, as long as that brings more mixing than waiting, and no more waiting than `limit` (`swap_packs`).
    3. Where more is waited all the same do 1 and 2 again, with smaller leaves. Keep the order that waits least then.
    4. Swap packs likewise, where ranks run several. Shuffle the iterations, the ranks of each and the packs of each
       rank: part of an iteration, at an epoch's end, is as good a sample as others.

    Args:
        seconds: of each pack, [P, parts]; ranks wait for the fullest one of each part.
        features: of each pack, [P, F]; what is to be spread over the iterations, scaled to equal importance.
        ranks: the packs of each rank, which fill iterations, [I * D, M].
        limit: share of device time that may be spent waiting.
        effort: nominal seconds for the swaps, in each way.

    Returns:
        Pack numbers [I, D, M].
    """
    own = seconds[ranks].sum(axis=1), features[ranks].sum(axis=1)
    best, least = np.arange(len(ranks)).reshape(-1, data_parallel_size), math.inf
    for unlike in UNLIKE:
        rows = _alike(own[0], data_parallel_size, unlike, seed)
        rows = swap_packs(*own, rows[:, :, None], SPENT * limit, seed, effort)[:, :, 0]
        waits = wait(own[0][rows])
        if waits < least:
            best, least = rows, waits
        if waits <= limit:
            break
    dealt = ranks[best]
    if ranks.shape[1] > 1:
        dealt = swap_packs(seconds, features, dealt, SPENT * limit, seed, effort)
    generator = np.random.default_rng((seed, 1))
    dealt = generator.permuted(generator.permutation(dealt), axis=2)
    shuffled = generator.random(dealt.shape[:2]).argsort(axis=1)
    return np.take_along_axis(dealt, shuffled[:, :, None], axis=1)


def _alike(seconds: Floats, data_parallel_size: int, unlike: float, seed: int) -> Ints:
    """Group ranks into iterations of ranks that are alike, [I, D], at random where they hardly differ."""
    # The fullest of D ranks is sqrt(2 ln D) deviations above the mean or less; one deviation is 1.25 mean distances.
    share = unlike / (1.25 * math.sqrt(2 * math.log(max(2, data_parallel_size))))
    order = np.arange(len(seconds))
    tolerance = share * float(seconds.sum(axis=1).mean())
    starts = halve(np.ascontiguousarray(seconds.T), order, data_parallel_size, tolerance) * data_parallel_size
    leaf = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    order = order[np.lexsort((np.random.default_rng((seed, 2)).random(len(order)), leaf))]
    return order.reshape(-1, data_parallel_size)
