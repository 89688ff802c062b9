"""Swap packs between iterations to make iterations more like the corpus, within a limit on waiting."""

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.kd_tree import halve
from omnibal_ext.packing.ordering.waiting import (
    ROUNDS,
    Iterations,
    allowed_wait,
    change_of_swap,
    falling_prices,
    iterations_of,
    swap,
    waited,
)
from omnibal_ext.packing.random_bits import below

SWAPS_A_SECOND = 12_000_000  # swaps tried per nominal second
LEAST_SWAPS, MOST_SWAPS = 16, 2_000  # per pack: fewer are useless, more change next to nothing


def swap_packs(seconds: Floats, features: Floats, slots: Ints, limit: float, seed: int, effort: float) -> Ints:
    """Swap packs between iterations to bring all near to the mean features, within a limit on waiting.

    1. Draw a pack, and a second one near it in an order of similar seconds.
    2. Swap them if the squared feature distances fall by more than the price of the added waiting, and total waiting
       stays within `limit`.
    3. Repeat at a falling price, so that swaps which gain most per second of waiting come first.

    Args:
        seconds: [P, parts].
        features: [P, F], of mean 0.
        slots: pack numbers, [I, D, M]; not changed.
        limit: fraction of time spent waiting.
        effort: number of steps, given in nominal seconds.

    Returns:
        Pack numbers [I, D, M].
    """
    iterations, ranks, micro_batches = slots.shape
    steps = int(effort * min(SWAPS_A_SECOND, MOST_SWAPS * slots.size))
    if iterations < 2 or features.shape[1] == 0 or steps < LEAST_SWAPS * slots.size or not seconds.any():
        return slots
    order = slots.ravel().copy()
    halve(np.ascontiguousarray(seconds.T), order, 1, 0.0)
    costs = seconds * (iterations * ranks / seconds[order].sum())
    pack_at, slot_of = slots.ravel().copy(), np.full(len(seconds), -1, np.int64)
    slot_of[pack_at] = np.arange(slots.size)
    state = iterations_of(costs, features, slots)
    allowed, waiting = allowed_wait(limit, state), waited(state)
    arguments = costs, features, order, pack_at, slot_of, micro_batches, state
    for number, price in enumerate(falling_prices(state, allowed)):
        waiting = _round(*arguments, price, waiting, allowed, seed + number, steps // ROUNDS)
    return pack_at.reshape(slots.shape)


@numba.njit(cache=True)
def _round(
    costs: Floats,
    features: Floats,
    order: Ints,
    pack_at: Ints,
    slot_of: Ints,
    micro_batches: int,
    state: Iterations,
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
        further, longer = change_of_swap(state, rank, other_rank, costs, features, one, other)
        if longer > 0 and waiting + longer > allowed:
            continue
        if price * longer + further < -1e-9:
            waiting += longer
            swap(state, rank, other_rank, costs, features, one, other)
            pack_at[slot_of[one]], pack_at[slot_of[other]] = other, one
            slot_of[one], slot_of[other] = slot_of[other], slot_of[one]
    return waiting
