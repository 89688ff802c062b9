"""Packs that are full still give way: samples as long as each other change places, for what else they bring.

    a text of 812 tokens goes for three images and a question, of 812 tokens, in another pack as full as this one

Two packs drawn at random hardly have two such samples. So samples stand in the order of the size that packs are full
of, and each meets others that stand near.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.random_bits import below

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LOOKS_A_SECOND = 20_000_000  # at two samples
MOST_LOOKS = 100  # of a sample: more bring next to nothing
NEAR = 64  # places apart


class Places(NamedTuple):
    """Who is where: samples in packs, packs on ranks."""

    owners: Ints  # [N] the pack of each sample
    loads: Ints  # [P, K]
    ranks: Ints  # [P] which runs the pack, or -1
    sums: Floats  # [R, parts] seconds
    kin: Ints  # [P, 2] the first pack of its kin, which stand side by side, and how many there are


def in_order_of_the_fullest(sizes: Ints, budgets: Ints, seed: int) -> Ints:
    """Return the samples in ascending order of the size of which packs have most of the budget, equal ones at random.

    Args:
        sizes: of each sample, [N, K].
        budgets: [K].
    """
    fullest = int(np.argmax(sizes.sum(axis=0) / np.maximum(budgets, 1)))
    order = np.random.default_rng(seed).permutation(len(sizes))
    return order[np.argsort(sizes[order, fullest], kind="stable")]


@numba.njit(cache=True)
def swap_twins(
    order: Ints, costs: Floats, sizes: Ints, budgets: Ints, places: Places, tolerance: float, seed: int, looks: int
) -> None:
    """Swap samples that stand near each other in `order`, where that brings their ranks nearer to each other.

    Args:
        order: [N] samples, those of one kin side by side.
        costs: of each sample, [N, parts].
        sizes: of each sample, [N, K]; those of a pack are never above `budgets` [K].
        places: changed in place.
        tolerance: distance of two ranks from their mean at which they are left alone.
    """
    for look in range(looks):
        place = below(len(order), seed, 2 * look)
        other = place + 1 + below(NEAR, seed, 2 * look + 1)
        if other >= len(order):
            continue
        one, two = order[place], order[other]
        here, there = places.owners[one], places.owners[two]
        rank, other_rank = places.ranks[here], places.ranks[there]
        if rank == other_rank or rank < 0 or other_rank < 0 or places.kin[here, 0] != places.kin[there, 0]:
            continue
        before, after = 0.0, 0.0
        for part in range(costs.shape[1]):
            half = (places.sums[rank, part] - places.sums[other_rank, part]) / 2
            moved = costs[two, part] - costs[one, part]
            before += half * half
            after += (half + moved) * (half + moved)
        if before < tolerance**2 or after >= before:
            continue
        if still_fit(sizes, places.loads, budgets, here, there, one, two):
            places.owners[one], places.owners[two] = there, here
            places.sums[rank] += costs[two] - costs[one]
            places.sums[other_rank] += costs[one] - costs[two]
            places.loads[here] += sizes[two] - sizes[one]
            places.loads[there] += sizes[one] - sizes[two]


@numba.njit(cache=True)
def still_fit(sizes: Ints, loads: Ints, budgets: Ints, here: int, there: int, one: int, two: int) -> bool:
    """Whether both packs keep the budgets if sample `one` of the pack `here` goes for sample `two` of the other."""
    for size in range(len(budgets)):
        more = sizes[two, size] - sizes[one, size]
        if loads[here, size] + more > budgets[size] or loads[there, size] - more > budgets[size]:
            return False
    return True
