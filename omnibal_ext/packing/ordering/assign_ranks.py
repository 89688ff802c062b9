"""Assign the packs of an iteration to ranks: as many each, near-equal seconds in every part of the model."""

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints

ROUNDS = 6  # at most so many swaps per rank of an iteration
PARTNERS = 32  # ranks tried as partners of one swap


def assign_zigzag(groups: Ints, data_parallel_size: int) -> Ints:
    """Assign each global batch of packs to D ranks in alternating direction: [I, D * M] to [I, D, M].

    0 1 2 3 4 5 over 2 ranks: rank 0 runs 0 3 4, rank 1 runs 1 2 5.
    """
    rounds = groups.reshape(len(groups), groups.shape[1] // data_parallel_size, data_parallel_size).copy()
    rounds[:, 1::2] = rounds[:, 1::2, ::-1]
    return np.ascontiguousarray(rounds.transpose(0, 2, 1))


def stored_order(iterations: Ints) -> Ints:
    """Return the order that `assign_zigzag` turns into `iterations`: [I, D, M] to [I, D * M]."""
    rounds = iterations.transpose(0, 2, 1).copy()
    rounds[:, 1::2] = rounds[:, 1::2, ::-1]
    return rounds.reshape(len(rounds), rounds.shape[1] * rounds.shape[2])


def assign_balanced(seconds: Floats, groups: Ints, data_parallel_size: int) -> Ints:
    """Assign each group of packs so that ranks' seconds are near-equal in every part: [I, D * M] to [I, D, M].

    1. In rounds of D packs, costliest first: the costliest pack goes to the rank with the fewest seconds so far.
    2. Swap a pack of the rank furthest from the mean with one of another rank while that brings sums nearer to the
       mean.

    With one pack per rank nothing can be balanced.

    Args:
        seconds: [P, parts].
        groups: pack numbers; -1 is an empty pack, which costs nothing.
    """
    if groups.shape[1] == data_parallel_size:
        return groups[:, :, None].copy()
    costs = np.vstack([seconds, np.zeros((1, seconds.shape[1]))])  # pack -1 is the last row
    slots = np.empty((len(groups), data_parallel_size, groups.shape[1] // data_parallel_size), np.int64)
    _assign_balanced(costs, groups, slots)
    return slots


@numba.njit(cache=True)
def _assign_balanced(costs: Floats, groups: Ints, slots: Ints) -> None:
    _, ranks, turns = slots.shape
    parts = costs.shape[1]
    totals = costs.sum(axis=1)
    for number in range(len(groups)):
        group = groups[number]
        order = np.argsort(-totals[group], kind="mergesort")
        sums = np.zeros((ranks, parts))
        so_far = np.zeros(ranks)
        for turn in range(turns):
            lightest = np.argsort(so_far, kind="mergesort")
            for position in range(ranks):
                pack, rank = group[order[turn * ranks + position]], lightest[position]
                slots[number, rank, turn] = pack
                so_far[rank] += totals[pack]
                sums[rank] += costs[pack]
        _swap(costs, slots[number], sums)


@numba.njit(cache=True)
def _swap(costs: Floats, slots: Ints, sums: Floats) -> None:
    """Swap packs to lessen the ranks' squared distances from the mean, until no rank improves."""
    ranks, turns = slots.shape
    parts = sums.shape[1]
    for part in range(parts):
        sums[:, part] -= sums[:, part].mean()
    stuck = np.zeros(ranks, np.bool_)
    for step in range(ROUNDS * ranks):
        worst, most = -1, 0.0
        for rank in range(ranks):
            distance = (sums[rank] ** 2).sum()
            if not stuck[rank] and distance > most:
                worst, most = rank, distance
        if worst < 0:
            return
        best, best_i, best_rank, best_j = -1e-9 * most, 0, -1, 0
        for partner in range(min(ranks, PARTNERS)):
            other = partner if ranks <= PARTNERS else (worst + 1 + partner * ranks // PARTNERS + step) % ranks
            if other == worst:
                continue
            for i in range(turns):
                for j in range(turns):
                    change = 0.0
                    for part in range(parts):
                        moved = costs[slots[other, j], part] - costs[slots[worst, i], part]
                        change += moved * (sums[worst, part] - sums[other, part] + moved)
                    if change < best:
                        best, best_i, best_rank, best_j = change, i, other, j
        if best_rank < 0:
            stuck[worst] = True
            continue
        stuck[:] = False
        moved = costs[slots[best_rank, best_j]] - costs[slots[worst, best_i]]
        sums[worst] += moved
        sums[best_rank] -= moved
        pack = slots[worst, best_i]
        slots[worst, best_i] = slots[best_rank, best_j]
        slots[best_rank, best_j] = pack
