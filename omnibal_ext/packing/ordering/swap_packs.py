"""Packs, or ranks of several, change iterations where that mixes more than the waiting is worth."""

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.kd_tree import halve
from omnibal_ext.packing.ordering.waiting import (
    ROUNDS,
    Iterations,
    change_of_swap,
    falling_prices,
    iterations_of,
    most_to_wait,
    swap,
    waited,
)
from omnibal_ext.packing.random_bits import below

SWAPS_A_SECOND = 12_000_000  # looked at
LEAST_SWAPS, MOST_SWAPS = 16, 2_000  # of a pack: fewer are not worth the while, more bring next to nothing


def swap_packs(seconds: Floats, features: Floats, dealt: Ints, limit: float, seed: int, effort: float) -> Ints:
    """Swap packs between iterations until these are as near to the mean in all features as the limit of waiting lets.

    1. Draw a pack, and another one that is more or less near to it in an order of likeness in seconds.
    2. Let them change places where the features' squared distances fall by more than the price of what is waited
       longer; never where that would make it more than `limit`.
    3. Repeat, at a falling price: first comes what costs least for what it brings.

    Args:
        seconds: [P, parts].
        features: [P, F], of mean 0.
        dealt: [I, D, M]; not changed.
        limit: share of time spent waiting.
        effort: nominal seconds; counts steps.

    Returns:
        Packs [I, D, M].
    """
    iterations, ranks, micro_batches = dealt.shape
    steps = int(effort * min(SWAPS_A_SECOND, MOST_SWAPS * dealt.size))
    if iterations < 2 or features.shape[1] == 0 or steps < LEAST_SWAPS * dealt.size or not seconds.any():
        return dealt
    alike = dealt.ravel().copy()
    halve(np.ascontiguousarray(seconds.T), alike, 1, 0.0)
    costs = seconds * (iterations * ranks / seconds[alike].sum())
    slots, places = dealt.ravel().copy(), np.full(len(seconds), -1, np.int64)
    places[slots] = np.arange(dealt.size)
    state = iterations_of(costs, features, dealt)
    allowed, waiting = most_to_wait(limit, state), waited(state)
    given = costs, features, alike, slots, places, micro_batches, state
    for number, price in enumerate(falling_prices(state, allowed)):
        waiting = _round(*given, price, waiting, allowed, seed + number, steps // ROUNDS)
    return slots.reshape(dealt.shape)


@numba.njit(cache=True)
def _round(
    costs: Floats,
    features: Floats,
    alike: Ints,
    slots: Ints,
    places: Ints,
    micro_batches: int,
    state: Iterations,
    price: float,
    waiting: float,
    allowed: float,
    seed: int,
    steps: int,
) -> float:
    """Try swaps; `slots` [I * D * M] has the pack of each place, `places` [P] the place of each pack.

    Returns:
        What is waited then, which was `waiting`.
    """
    batch = len(slots) // len(state.sums)
    widths = 1
    while (1 << widths) < len(alike) // 2:
        widths += 1
    for step in range(steps):
        here = below(len(alike), seed, 3 * step)
        width = 2 << below(widths, seed, 3 * step + 1)
        one, other = alike[here], alike[(here + 1 + below(width, seed, 3 * step + 2)) % len(alike)]
        if places[one] // batch == places[other] // batch:
            continue
        rank, other_rank = places[one] // micro_batches, places[other] // micro_batches
        further, longer = change_of_swap(state, rank, other_rank, costs, features, one, other)
        if longer > 0 and waiting + longer > allowed:
            continue
        if price * longer + further < -1e-9:
            waiting += longer
            swap(state, rank, other_rank, costs, features, one, other)
            slots[places[one]], slots[places[other]] = other, one
            places[one], places[other] = places[other], places[one]
    return waiting
