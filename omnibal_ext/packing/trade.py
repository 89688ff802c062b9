"""Some waiting for more mixing: packs change iterations where that mixes more than the waiting it brings is worth."""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.random_bits import below
from omnibal_ext.packing.rows import halve

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SWAPS_A_SECOND = 12_000_000  # looked at
LEAST_SWAPS, MOST_SWAPS = 16, 2_000  # of a pack: fewer are not worth the while, more bring next to nothing
ROUNDS, DEAREST, CHEAPER = 24, 10.0, 0.6  # the price of waiting falls from round to round


class _State(NamedTuple):
    """Where packs run, and what that makes of iterations; a mean rank has one second in each."""

    slots: Ints  # [I * D * M] the pack of each place
    places: Ints  # [P] the place of each pack
    sums: Floats  # [I, F] features
    loads: Floats  # [I, D, parts] seconds
    highest: Floats  # [I, parts, 2] seconds of the fullest rank, and of the next
    fullest: Ints  # [I, parts] rank


def trade(seconds: Floats, features: Floats, dealt: Ints, limit: float, seed: int, effort: float) -> Ints:
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
    places = np.full(len(seconds), -1, np.int64)
    places[dealt.ravel()] = np.arange(dealt.size)
    loads, sums = costs[dealt].sum(axis=2), features[dealt].sum(axis=(1, 2))
    parts = costs.shape[1]
    highest, fullest = np.zeros((iterations, parts, 2)), np.zeros((iterations, parts), np.int64)
    state = _State(dealt.ravel().copy(), places, sums, loads, highest, fullest)
    allowed = limit / (1 - limit) * iterations
    price = DEAREST * float((sums**2).sum()) / allowed
    for number in range(ROUNDS):
        _round(costs, features, alike, state, price, allowed, micro_batches, seed + number, steps // ROUNDS)
        price *= CHEAPER
    return state.slots.reshape(dealt.shape)


@numba.njit(cache=True)
def _round(
    costs: Floats,
    features: Floats,
    alike: Ints,
    state: _State,
    price: float,
    allowed: float,
    micro_batches: int,
    seed: int,
    steps: int,
) -> None:
    iterations, ranks, parts = state.loads.shape
    waiting = 0.0
    for number in range(iterations):
        _find_fullest(state, number)
        for part in range(parts):
            waiting += state.highest[number, part, 0] - state.loads[number, :, part].mean()
    widths = 1
    while (1 << widths) < len(alike) // 2:
        widths += 1
    for step in range(steps):
        here = below(len(alike), seed, 3 * step)
        width = 2 << below(widths, seed, 3 * step + 1)
        one, other = alike[here], alike[(here + 1 + below(width, seed, 3 * step + 2)) % len(alike)]
        rank_one, rank_other = state.places[one] // micro_batches, state.places[other] // micro_batches
        first, second = rank_one // ranks, rank_other // ranks
        if first == second:
            continue
        more = _waited_longer(costs, state, first, rank_one % ranks, one, other)
        more += _waited_longer(costs, state, second, rank_other % ranks, other, one)
        if more > 0 and waiting + more > allowed:
            continue
        change = price * more
        for feature in range(features.shape[1]):
            moved = features[other, feature] - features[one, feature]
            change += 2 * moved * (state.sums[first, feature] - state.sums[second, feature] + moved)
        if change < -1e-9:
            waiting += more
            state.slots[state.places[one]], state.slots[state.places[other]] = other, one
            state.places[one], state.places[other] = state.places[other], state.places[one]
            _exchange(costs, features, state, first, rank_one % ranks, one, other)
            _exchange(costs, features, state, second, rank_other % ranks, other, one)


@numba.njit(cache=True)
def _find_fullest(state: _State, iteration: int) -> None:
    for part in range(state.loads.shape[2]):
        top, following, fullest = -1.0, -1.0, 0
        for rank in range(state.loads.shape[1]):
            load = state.loads[iteration, rank, part]
            if load > top:
                top, following, fullest = load, top, rank
            elif load > following:
                following = load
        state.highest[iteration, part, 0], state.highest[iteration, part, 1] = top, following
        state.fullest[iteration, part] = fullest


@numba.njit(cache=True)
def _waited_longer(costs: Floats, state: _State, iteration: int, rank: int, gone: int, come: int) -> float:
    """Return by how much the fullest ranks of an iteration grow, in all parts, if one of its packs makes way."""
    more = 0.0
    for part in range(costs.shape[1]):
        others = state.highest[iteration, part, 1 if state.fullest[iteration, part] == rank else 0]
        own = state.loads[iteration, rank, part] + costs[come, part] - costs[gone, part]
        more += max(others, own) - state.highest[iteration, part, 0]
    return more


@numba.njit(cache=True)
def _exchange(costs: Floats, features: Floats, state: _State, iteration: int, rank: int, gone: int, come: int) -> None:
    for part in range(costs.shape[1]):
        state.loads[iteration, rank, part] += costs[come, part] - costs[gone, part]
    for feature in range(features.shape[1]):
        state.sums[iteration, feature] += features[come, feature] - features[gone, feature]
    _find_fullest(state, iteration)
