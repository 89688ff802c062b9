"""Group ranks into iterations in which ranks hardly wait and which look like the corpus.

    rank       M packs whose seconds add up to about the mean
    iteration  D ranks of similar seconds whose samples together look like the corpus

Loops count steps, not seconds of a clock: a seed gives the same order on any machine.
"""

from itertools import product

import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.metrics import wait
from omnibal_ext.packing.ordering.swap_packs import swap_packs

SPENT = 0.95  # of the allowed wait, as that of incomplete iterations is only estimated
BANDS = 2, 4, 8, 16, 32, 64, 128  # of a part's seconds, in which ranks are sorted by those of the other parts
MUCH_LESS = 0.9  # of what ranks wait for, sorted by all seconds


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

    1. Sort ranks by seconds; every D ranks in a row are an iteration.
    2. Swap ranks between iterations (`swap_packs`) within `limit`.
    3. Where ranks run several packs, swap packs likewise. Shuffle the iterations, the ranks in each and the packs of
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
    limit *= SPENT
    rank_seconds, rank_features = seconds[ranks].sum(axis=1), features[ranks].sum(axis=1)
    order = _alike_in_a_row(rank_seconds, data_parallel_size, limit)
    slots = ranks[swap_packs(rank_seconds, rank_features, order, limit, seed, effort)[:, :, 0]]
    if ranks.shape[1] > 1:
        slots = swap_packs(seconds, features, slots, limit, seed, effort)
    generator = np.random.default_rng((seed, 1))
    slots = generator.permuted(generator.permutation(slots), axis=2)
    shuffled = generator.random(slots.shape[:2]).argsort(axis=1)
    return np.take_along_axis(slots, shuffled[:, :, None], axis=1)


def _alike_in_a_row(seconds: Floats, data_parallel_size: int, limit: float) -> Ints:
    """Return ranks sorted so that those of each iteration cost about the same: [I, D, 1].

    By the sum of their seconds [R, parts]. If they then wait for more than `limit`, and parts are several: by bands of
    one part's seconds, and by the others' up one band and down the next, if that waits for much less (`MUCH_LESS`).
    """

    def waits(order: Ints) -> float:
        return wait(seconds[order.reshape(-1, data_parallel_size)])

    total = seconds.sum(axis=1)
    best = np.argsort(total, kind="stable")
    most = waits(best)
    if most > limit and seconds.shape[1] > 1:
        for part, bands in product(range(seconds.shape[1]), BANDS):
            own = seconds[:, part]
            band = np.unique((own - own.min()) * bands // (np.ptp(own) or 1.0), return_inverse=True)[1]  # none is empty
            snake = np.lexsort(((total - own) * np.where(band % 2, -1, 1), band))
            best = snake if waits(snake) < min(waits(best), MUCH_LESS * most) else best
    return best.reshape(-1, data_parallel_size, 1)
