"""Which rank of an iteration runs which of its packs: equal numbers, level sums of every part's seconds."""

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints

ROUNDS = 6  # swaps tried for each rank of an iteration
PARTNERS = 32  # ranks that a pack may be swapped with at a time


def deal(groups: Ints, data_parallel_size: int) -> Ints:
    """Deal each global batch of packs over D ranks to and fro: [I, D * M] to [I, D, M].

    0 1 2 3 4 5 over 2 ranks: rank 0 runs 0 3 4, rank 1 runs 1 2 5.
    """
    rounds = groups.reshape(len(groups), groups.shape[1] // data_parallel_size, data_parallel_size).copy()
    rounds[:, 1::2] = rounds[:, 1::2, ::-1]
    return np.ascontiguousarray(rounds.transpose(0, 2, 1))


def stored_order(iterations: Ints) -> Ints:
    """Return the order of packs that `deal` deals so: [I, D, M] to [I, D * M]."""
    rounds = iterations.transpose(0, 2, 1).copy()
    rounds[:, 1::2] = rounds[:, 1::2, ::-1]
    return rounds.reshape(len(rounds), rounds.shape[1] * rounds.shape[2])


def deal_level(seconds: Floats, groups: Ints, data_parallel_size: int) -> Ints:
    """Deal each group of packs so that the ranks' sums are level, in every part: [I, D * M] to [I, D, M].

    1. From the dearest D packs of a group to the cheapest D: the dearest goes to the rank with the least so far.
    2. Swap a pack of the rank that is furthest from the mean with one of another rank, as long as that levels the sums.
       (With one pack a rank there is nothing to level.)

    Args:
        seconds: [P, parts].
        groups: pack numbers; -1 is an empty pack, which costs nothing.
    """
    if groups.shape[1] == data_parallel_size:
        return groups[:, :, None].copy()
    costs = np.vstack([seconds, np.zeros((1, seconds.shape[1]))])  # pack -1 is the last row
    dealt = np.empty((len(groups), data_parallel_size, groups.shape[1] // data_parallel_size), np.int64)
    _deal_level(costs, groups, dealt)
    return dealt


@numba.njit(cache=True)
def _deal_level(costs: Floats, groups: Ints, dealt: Ints) -> None:
    _, ranks, turns = dealt.shape
    parts = costs.shape[1]
    totals = costs.sum(axis=1)
    for number in range(len(groups)):
        group = groups[number]
        order = np.argsort(-totals[group], kind="mergesort")
        sums = np.zeros((ranks, parts))
        so_far = np.zeros(ranks)
        for turn in range(turns):
            lightest = np.argsort(so_far, kind="mergesort")
            for place in range(ranks):
                pack, rank = group[order[turn * ranks + place]], lightest[place]
                dealt[number, rank, turn] = pack
                so_far[rank] += totals[pack]
                sums[rank] += costs[pack]
        _swap(costs, dealt[number], sums)


@numba.njit(cache=True)
def _swap(costs: Floats, dealt: Ints, sums: Floats) -> None:
    """Lessen the ranks' squared distances from the mean, rank by rank, until the furthest ones cannot be helped."""
    ranks, turns = dealt.shape
    parts = sums.shape[1]
    for part in range(parts):
        sums[:, part] -= sums[:, part].mean()
    helpless = np.zeros(ranks, np.bool_)
    for step in range(ROUNDS * ranks):
        far, most = -1, 0.0
        for rank in range(ranks):
            distance = (sums[rank] ** 2).sum()
            if not helpless[rank] and distance > most:
                far, most = rank, distance
        if far < 0:
            return
        best, best_i, best_rank, best_j = -1e-9 * most, 0, -1, 0
        for partner in range(min(ranks, PARTNERS)):
            other = partner if ranks <= PARTNERS else (far + 1 + partner * ranks // PARTNERS + step) % ranks
            if other == far:
                continue
            for i in range(turns):
                for j in range(turns):
                    change = 0.0
                    for part in range(parts):
                        moved = costs[dealt[other, j], part] - costs[dealt[far, i], part]
                        change += moved * (sums[far, part] - sums[other, part] + moved)
                    if change < best:
                        best, best_i, best_rank, best_j = change, i, other, j
        if best_rank < 0:
            helpless[far] = True
            continue
        helpless[:] = False
        moved = costs[dealt[best_rank, best_j]] - costs[dealt[far, best_i]]
        sums[far] += moved
        sums[best_rank] -= moved
        pack = dealt[far, best_i]
        dealt[far, best_i] = dealt[best_rank, best_j]
        dealt[best_rank, best_j] = pack
