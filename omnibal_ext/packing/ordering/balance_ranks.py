"""Group packs by rank: M packs each, with sums of seconds as near to the mean as possible.

packs    5 5 5 4 | 4 3 3 3        two microbatches a rank
ranks    5 3 | 5 3 | 5 3 | 4 4

An index stores the packs of an iteration in rounds of D, in alternating direction (`assign_zigzag`).
"""

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.metrics import wait
from omnibal_ext.packing.random_bits import below

SWAPS_A_SECOND = 4_000_000  # swaps tried per nominal second
LEAST_SWAPS = 64  # per pack, whatever `effort`
POINTS = 32  # among packs by cost, around which those of a last iteration may be
OPENED = 8  # groups placed for the first epochs; each epoch opens another one


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


def split_leftover(
    seconds: Floats, count: int, avoid: NDArray[np.bool_] | None = None, *, ranks: int = 0, limit: float = 0.0
) -> tuple[Ints, Ints]:
    """Choose `count` packs evenly over the range of costs; return their numbers and the others', cheapest first.

    Args:
        seconds: of each pack, [P, parts].
        avoid: packs to take only if the others do not suffice, [P].
        ranks: of an iteration of one pack a rank, in which nothing compensates: choose packs that cost the same.
        limit: fraction of time that these may wait.
    """
    by_cost = np.argsort(seconds.sum(axis=1), kind="stable")
    free = np.ones(len(by_cost), np.bool_) if avoid is None else ~avoid[by_cost]
    if np.count_nonzero(free) < count:
        free[:] = True
    candidates = np.flatnonzero(free)
    chosen = np.zeros(len(by_cost), np.bool_)
    if ranks:
        candidates = candidates[_alike(seconds[by_cost[candidates]], ranks, limit)[:count]]
    chosen[candidates[np.arange(count) * len(candidates) // max(1, count)]] = True
    return by_cost[chosen], by_cost[~chosen]


def _alike(seconds: Floats, ranks: int, limit: float) -> Ints:
    """Return the packs' numbers, those first whose seconds [P, parts] are nearest to the median's.

    Where the first `ranks` would wait for more than `limit`: nearest to that one, of `POINTS`, at which they wait
    least.
    """

    def nearest(middle: Floats) -> Ints:
        return np.argsort(np.abs(seconds - middle).sum(axis=1), kind="stable")

    def waits(order: Ints) -> float:
        return wait(seconds[None, order[:ranks]])

    order = nearest(np.median(seconds, axis=0))
    if waits(order) > limit:
        slots = np.linspace(0, len(seconds) - 1, POINTS).astype(np.int64)
        order = min(map(nearest, seconds[slots]), key=waits)
    return order


def place_opened(seconds: Floats, batch: int, opened: Ints) -> Ints:
    """Return an order of packs, [P], that moves groups which cost what the leftover packs cost to the places `opened`.

    A later epoch splits such a group to complete the iteration that leftover packs begin, with one pack a rank.

    Args:
        seconds: of groups of `batch` packs and of the leftover packs behind them, [P, parts].
        opened: groups in the order in which epochs split them.
    """
    complete = len(seconds) // batch
    groups, left = seconds[: complete * batch].reshape(complete, batch, -1), seconds[complete * batch :]
    first, slots = groups[:, : batch - len(left)], np.arange(complete)
    if len(left):
        highest = np.maximum(first.max(axis=1), left.max(axis=0))
        waited = highest - (first.sum(axis=1) + left.sum(axis=0)) / batch
        nearest = np.argsort(waited.sum(axis=1), kind="stable")
        for slot, group in zip(opened[:OPENED].tolist(), nearest.tolist(), strict=False):
            at = int(np.flatnonzero(slots == group)[0])
            slots[[slot, at]] = slots[[at, slot]]
    order = np.arange(len(seconds))
    order[: complete * batch] = order[: complete * batch].reshape(complete, batch)[slots].ravel()
    return order


def balance_iterations(seconds: Floats, groups: Ints, data_parallel_size: int) -> Ints:
    """Balance the ranks of each iteration on its own (`balance_ranks`): [I, D * M] to [I, D, M].

    Args:
        seconds: [P, parts].
        groups: pack numbers; -1 is an empty pack, which costs nothing.
    """
    micro_batches = groups.shape[1] // data_parallel_size
    if micro_batches == 1:  # nothing can be balanced
        return groups[:, :, None].copy()
    costs = np.vstack([seconds, np.zeros((1, seconds.shape[1]))])  # pack -1 is the last row
    slots = [group[balance_ranks(costs[group], micro_batches)] for group in groups]
    return np.array(slots, np.int64).reshape(-1, data_parallel_size, micro_batches)


def balance_ranks(seconds: Floats, micro_batches: int, seed: int = 0, effort: float = 0.0) -> Ints:
    """Assign M packs to each rank so that sums of seconds are near-equal in every part: [R, M].

    1. Sort packs by cost, equal ones at random, and cut that order into M equal ranges; a rank takes one of each.
    2. Swap random pairs of packs if that brings both ranks nearer to the mean.

    Args:
        seconds: of each pack, [R * M, parts].
        effort: number of steps, given in nominal seconds: results do not depend on the machine.
    """
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(seconds))
    if micro_batches == 1:
        return order[:, None]
    order = order[np.argsort(seconds[order].sum(axis=1), kind="stable")]
    means = seconds.mean(axis=0)
    excess = (seconds - means) / (means.sum() or 1.0)
    pack_at = generator.permuted(order.reshape(micro_batches, -1), axis=1).T.ravel().copy()
    rounds = max(int(effort * SWAPS_A_SECOND) // len(seconds), LEAST_SWAPS)
    _swap(excess, pack_at, excess[pack_at.reshape(-1, micro_batches)].sum(axis=1), micro_batches, seed, rounds)
    return pack_at.reshape(-1, micro_batches)


@numba.njit(cache=True)
def _swap(excess: Floats, pack_at: Ints, sums: Floats, micro_batches: int, seed: int, rounds: int) -> None:
    """Swap packs of two ranks, in place, where that evens them; `pack_at` [R * M]: packs by rank, `sums` [R, parts]:
    ranks' seconds above the mean."""
    for turn in range(rounds):
        for here in range(len(pack_at)):
            there = below(len(pack_at), seed + turn, here)
            one, other = here // micro_batches, there // micro_batches
            if one == other:
                continue
            change = 0.0
            for part in range(excess.shape[1]):
                moved = excess[pack_at[there], part] - excess[pack_at[here], part]
                change += moved * (sums[one, part] - sums[other, part] + moved)
            if change < -1e-12:
                for part in range(excess.shape[1]):
                    moved = excess[pack_at[there], part] - excess[pack_at[here], part]
                    sums[one, part] += moved
                    sums[other, part] -= moved
                pack_at[here], pack_at[there] = pack_at[there], pack_at[here]
