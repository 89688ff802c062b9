"""Swap packs between iterations to make iterations more like the corpus, within a limit on waiting.

A swap's cost is price x added seconds of waiting + growth of the squared distances from the mean iteration.
"""

from typing import NamedTuple

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.random_bits import below

SWAPS_A_SECOND = 12_000_000  # swaps tried per nominal second
LEAST_SWAPS, MOST_SWAPS = 16, 2_000  # per pack: fewer are useless, more change next to nothing
ROUNDS, DEAREST, CHEAPER = 24, 10.0, 0.6  # the price of waiting falls from round to round
FEW_SWAPS = 500  # per pack; with fewer the price falls through the range alone in which swaps are found
OF_FEW = 0.5, 0.85  # DEAREST and CHEAPER then
SPENT = 0.99  # of the allowed wait, at which the price of few swaps stays: a lower one gives no seconds back


class _Iterations(NamedTuple):
    """Sums of every iteration; ranks are numbered through all iterations."""

    sums: Floats  # [I, F] features minus their mean over iterations
    loads: Floats  # [I * D, parts] seconds; the mean rank's sum over parts is 1
    highest: Floats  # [I, parts, 2] seconds of the slowest rank and of the second slowest
    fullest: Ints  # [I, parts] slowest rank


def swap_packs(seconds: Floats, features: Floats, slots: Ints, limit: float, seed: int, effort: float) -> Ints:
    """Swap packs between iterations to bring all near to the mean features, within a limit on waiting.

    1. Draw a pack, and a second one near it in an order of similar seconds.
    2. Swap them if the squared feature distances fall by more than the price of the added waiting, and total waiting
       stays within `limit`.
    3. Repeat at a falling price, so that swaps which gain most per second of waiting come first.

    Args:
        seconds: [P, parts].
        features: [P, F], of mean 0.
        slots: pack numbers, [I, D, M]; not changed. With one pack a rank, neighbours cost about the same.
        limit: fraction of time spent waiting.
        effort: number of steps, given in nominal seconds.

    Returns:
        Pack numbers [I, D, M].
    """
    iterations, ranks, micro_batches = slots.shape
    steps = int(effort * min(SWAPS_A_SECOND, MOST_SWAPS * slots.size))
    if iterations < 2 or features.shape[1] == 0 or steps < LEAST_SWAPS * slots.size or not seconds.any():
        return slots
    pack_at, slot_of = slots.ravel().copy(), np.full(len(seconds), -1, np.int64)
    order = pack_at.copy() if micro_batches == 1 else pack_at[np.argsort(seconds[pack_at].sum(axis=1), kind="stable")]
    slot_of[pack_at] = np.arange(slots.size)
    costs = seconds * (iterations * ranks / seconds[order].sum())
    state = _iterations_of(costs, features, slots)
    mean_loads = state.loads.reshape(iterations, ranks, -1).mean(axis=1)
    waiting = float((state.highest[:, :, 0] - mean_loads).sum())  # of a mean rank, summed over iterations and parts
    allowed = limit / (1 - limit) * iterations
    dearest, cheaper = OF_FEW if (few := steps < FEW_SWAPS * slots.size) else (DEAREST, CHEAPER)
    price = dearest * float((state.sums**2).sum()) / max(allowed, 1e-12)
    arguments = costs, features, order, pack_at, slot_of, micro_batches, state
    for number in range(ROUNDS):
        waiting = _round(*arguments, price, waiting, allowed, seed + number, steps // ROUNDS)
        price *= 1.0 if few and waiting > SPENT * allowed else cheaper
    return pack_at.reshape(slots.shape)


def _iterations_of(costs: Floats, features: Floats, slots: Ints) -> _Iterations:
    """Sum up the packs of each iteration; `costs` [P, parts] are scaled so that a mean rank has 1."""
    count, parts = len(slots), costs.shape[1]
    loads = costs[slots].sum(axis=2).reshape(-1, parts)
    highest, fullest = np.zeros((count, parts, 2)), np.zeros((count, parts), np.int64)
    iterations = _Iterations(features[slots].sum(axis=(1, 2)), loads, highest, fullest)
    for number in range(count):
        _find_fullest(iterations, number)
    return iterations


@numba.njit(cache=True)
def _round(
    costs: Floats,
    features: Floats,
    order: Ints,
    pack_at: Ints,
    slot_of: Ints,
    micro_batches: int,
    state: _Iterations,
    price: float,
    waiting: float,
    allowed: float,
    seed: int,
    steps: int,
) -> float:
    """Try `steps` swaps; return the seconds waited afterwards (`waiting` before).

    `pack_at` [I * D * M] is the pack in each slot, `slot_of` [P] its inverse.
    """
    batch = len(pack_at) // len(state.sums)
    widths = 1
    while (1 << widths) < len(order) // 2:
        widths += 1
    for step in range(steps):
        here = below(len(order), seed, 3 * step)
        width = 2 << below(widths, seed, 3 * step + 1)
        one, other = order[here], order[(here + 1 + below(width, seed, 3 * step + 2)) % len(order)]
        if slot_of[one] // batch == slot_of[other] // batch:
            continue
        rank, other_rank = slot_of[one] // micro_batches, slot_of[other] // micro_batches
        further, longer = _change_of_swap(state, rank, other_rank, costs, features, one, other)
        if longer > 0 and waiting + longer > allowed:
            continue
        if price * longer + further < -1e-9:
            waiting += longer
            _swap(state, rank, other_rank, costs, features, one, other)
            pack_at[slot_of[one]], pack_at[slot_of[other]] = other, one
            slot_of[one], slot_of[other] = slot_of[other], slot_of[one]
    return waiting


@numba.njit(cache=True)
def _change_of_swap(
    iterations: _Iterations, here: int, there: int, costs: Floats, features: Floats, old: int, new: int
) -> tuple[float, float]:
    """Evaluate moving pack `old` from rank `here` to rank `there`, of another iteration, and `new` the other way.

    Returns:
        Growth of the squared distances from the mean, and of the seconds waited.
    """
    ranks = len(iterations.loads) // len(iterations.sums)
    first, second = here // ranks, there // ranks
    further = 0.0
    for feature in range(features.shape[1]):
        moved = features[new, feature] - features[old, feature]
        further += 2 * moved * (iterations.sums[first, feature] - iterations.sums[second, feature] + moved)
    longer = _grows(iterations, first, here, costs, old, new) + _grows(iterations, second, there, costs, new, old)
    return further, longer


@numba.njit(cache=True)
def _swap(iterations: _Iterations, here: int, there: int, costs: Floats, features: Floats, old: int, new: int) -> None:
    """Move pack `old` from rank `here` to rank `there`, and `new` the other way; update the sums, in place."""
    ranks = len(iterations.loads) // len(iterations.sums)
    for rank, sign in ((here, 1), (there, -1)):
        for part in range(costs.shape[1]):
            iterations.loads[rank, part] += sign * (costs[new, part] - costs[old, part])
        for feature in range(features.shape[1]):
            iterations.sums[rank // ranks, feature] += sign * (features[new, feature] - features[old, feature])
        _find_fullest(iterations, rank // ranks)


@numba.njit(cache=True)
def _grows(iterations: _Iterations, number: int, rank: int, costs: Floats, old: int, new: int) -> float:
    """Return the seconds, summed over parts, by which an iteration's slowest ranks slow down if `new` replaces
    `old`."""
    more = 0.0
    for part in range(costs.shape[1]):
        others = iterations.highest[number, part, 1 if iterations.fullest[number, part] == rank else 0]
        rank_seconds = iterations.loads[rank, part] + costs[new, part] - costs[old, part]
        more += max(others, rank_seconds) - iterations.highest[number, part, 0]
    return more


@numba.njit(cache=True)
def _find_fullest(iterations: _Iterations, number: int) -> None:
    ranks = len(iterations.loads) // len(iterations.sums)
    for part in range(iterations.loads.shape[1]):
        top, following, fullest = -1.0, -1.0, 0
        for rank in range(number * ranks, (number + 1) * ranks):
            load = iterations.loads[rank, part]
            if load > top:
                top, following, fullest = load, top, rank
            elif load > following:
                following = load
        iterations.highest[number, part, 0], iterations.highest[number, part, 1] = top, following
        iterations.fullest[number, part] = fullest
