"""Group ranks into iterations in which ranks hardly wait and which look like the corpus.

    rank       M packs whose seconds add up to about the mean
    iteration  D ranks of similar seconds whose samples together look like the corpus

Loops count steps, not seconds of a clock: a seed gives the same order on any machine.
"""

import math

import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.kd_tree import halve
from omnibal_ext.packing.ordering.metrics import wait
from omnibal_ext.packing.ordering.swap_packs import swap_packs

TOLERANCES = 0.005, 0.001, 0.0  # ranks that differ by less of their cost are interchangeable; tried in order
SPENT = 0.95  # of the allowed wait; the rest is for swaps of samples


def order_iterations(
    seconds: Floats,
    features: Floats,
    ranks: Ints,
    data_parallel_size: int,
    limit: float,
    seed: int,
    effort: float = 1.0,
) -> Ints:
    """Order packs by iteration: little waiting, and iterations near the mean in all features.

    1. Sort ranks by seconds with a k-d tree, down to leaves of interchangeable ranks. Shuffle each leaf; every D ranks
       in a row are an iteration.
    2. Swap ranks between iterations (`swap_packs`) within `limit`.
    3. If waiting still exceeds `limit`, repeat 1 and 2 with smaller leaves; keep the order that waits least.
    4. Where ranks run several packs, swap packs likewise. Shuffle the iterations, the ranks in each and the packs of
       each rank, so that any part of an iteration is a random sample too.

    Args:
        seconds: of each pack, [P, parts]; ranks wait for the fullest one of each part.
        features: of each pack, [P, F], scaled to equal weight.
        ranks: the packs of each rank, [I * D, M].
        limit: fraction of device time that ranks may wait.
        effort: number of steps of each stage of swaps, in nominal seconds.

    Returns:
        Pack numbers [I, D, M].
    """
    rank_values = seconds[ranks].sum(axis=1), features[ranks].sum(axis=1)
    best, least = np.arange(len(ranks)).reshape(-1, data_parallel_size), math.inf
    for tolerance_fraction in TOLERANCES:
        rows = _group_alike(rank_values[0], data_parallel_size, tolerance_fraction, seed)
        rows = swap_packs(*rank_values, rows[:, :, None], SPENT * limit, seed, effort)[:, :, 0]
        waits = wait(rank_values[0][rows])
        if waits < least:
            best, least = rows, waits
        if waits <= limit:
            break
    slots = ranks[best]
    if ranks.shape[1] > 1:
        slots = swap_packs(seconds, features, slots, SPENT * limit, seed, effort)
    generator = np.random.default_rng((seed, 1))
    slots = generator.permuted(generator.permutation(slots), axis=2)
    shuffled = generator.random(slots.shape[:2]).argsort(axis=1)
    return np.take_along_axis(slots, shuffled[:, :, None], axis=1)


def _group_alike(seconds: Floats, data_parallel_size: int, tolerance_fraction: float, seed: int) -> Ints:
    """Group ranks of similar seconds into iterations, [I, D]; interchangeable ranks at random."""
    # The fullest of D ranks is sqrt(2 ln D) deviations above the mean or less; one deviation is 1.25 mean distances.
    fraction = tolerance_fraction / (1.25 * math.sqrt(2 * math.log(max(2, data_parallel_size))))
    order = np.arange(len(seconds))
    tolerance = fraction * float(seconds.sum(axis=1).mean())
    starts = halve(np.ascontiguousarray(seconds.T), order, data_parallel_size, tolerance) * data_parallel_size
    leaf = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    order = order[np.lexsort((np.random.default_rng((seed, 2)).random(len(order)), leaf))]
    return order.reshape(-1, data_parallel_size)
