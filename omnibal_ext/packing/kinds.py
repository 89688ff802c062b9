"""No iteration without a kind of sample: where cheap packs hardly have it, a dearer one that has it goes there.

a cheap iteration    long videos only; then a pack of eight images, which costs 4% more: the others wait for it
samples make up      its long texts go for shorter ones of other packs (`exchange.py`), until none waits longer
"""

import math
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.teach import missing_kinds

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

LOOKS = 1000  # donors that a pack is compared with at most, the nearest in cost


class _State(NamedTuple):
    """Where packs are, and what they hold."""

    costs: Floats  # [P] seconds
    has: Bools  # [P, kinds]
    iterations: Ints  # [I, D * M] packs
    places: Ints  # [P] of each pack in `iterations`
    held: Ints  # [I, kinds] packs that hold each kind


def bring_kinds(seconds: Floats, has: Bools, dealt: Ints, share: float) -> Ints:
    """Let packs change iterations, one for one, so that no more iterations miss a kind than in a random order.

    Of packs that have it and are not missed where they come from, that comes which costs most nearly what one that
    makes way does (of the `LOOKS` nearest to each); first where they cost most nearly the same. No iteration comes to
    miss another kind. What is waited is of no concern.

    Args:
        seconds: [P, parts].
        has: which kinds each pack holds, [P, kinds].
        dealt: pack numbers, [I, D, M]; not changed.
        share: of the iterations that should not miss a kind, to how many a pack comes.

    Returns:
        Pack numbers [I, D, M]. Where none can come a kind is missed still.
    """
    iterations = dealt.reshape(len(dealt), -1).copy()
    _, expected = missing_kinds(iterations, has)
    packs = iterations.ravel().copy()
    places = np.full(len(has), -1, np.int64)
    places[packs] = np.arange(len(packs))
    state = _State(seconds.sum(axis=1), has, iterations, places, has[iterations].sum(axis=1))
    by_cost = packs[np.argsort(state.costs[packs], kind="stable")]
    for kind in range(has.shape[1]):
        missed = np.count_nonzero(state.held[:, kind] == 0)
        most = math.ceil((missed - expected[kind] * len(iterations)) * share - 1e-9)
        if most > 0:
            spare = state.held[places[by_cost] // iterations.shape[1], kind] > 1
            _bring(state, kind, most, by_cost[has[by_cost, kind] & spare])
    return iterations.reshape(dealt.shape)


@numba.njit(cache=True)
def _bring(state: _State, kind: int, most: int, donors: Ints) -> None:
    """Let donors, which stand from cheap to dear, go to so many of the iterations that miss a kind."""
    missing, costs = np.flatnonzero(state.held[:, kind] == 0), state.costs[donors]
    apart = np.empty(len(missing))
    for number in range(len(missing)):
        apart[number] = _nearest(state, donors, costs, missing[number])[0]
    for here in missing[np.argsort(apart, kind="mergesort")[:most]]:
        _, goes, comes = _nearest(state, donors, costs, here)
        if goes >= 0:
            _swap(state, goes, comes)


@numba.njit(cache=True)
def _nearest(state: _State, donors: Ints, costs: Floats, here: int) -> tuple[float, int, int]:
    """Return by how much a pack of an iteration and a donor differ in cost, and which two differ least; -1: none."""
    nearest, goes, comes = np.inf, -1, -1
    for pack in state.iterations[here]:
        above = np.searchsorted(costs, state.costs[pack])
        below = above - 1
        for _ in range(min(LOOKS, len(donors))):
            down = state.costs[pack] - costs[below] if below >= 0 else np.inf
            up = costs[above] - state.costs[pack] if above < len(donors) else np.inf
            if min(down, up) >= nearest:
                break
            donor = donors[below] if down < up else donors[above]
            if _none_missed(state, here, pack, donor):
                nearest, goes, comes = min(down, up), pack, donor
            if down < up:
                below -= 1
            else:
                above += 1
    return nearest, goes, comes


@numba.njit(cache=True)
def _none_missed(state: _State, here: int, goes: int, comes: int) -> bool:
    """Whether two iterations still hold what kinds they do if two packs change places."""
    there = state.places[comes] // state.iterations.shape[1]
    for kind in range(state.has.shape[1]):
        more = int(state.has[comes, kind]) - int(state.has[goes, kind])
        if (more < 0 and state.held[here, kind] == 1) or (more > 0 and state.held[there, kind] == 1):
            return False
    return True


@numba.njit(cache=True)
def _swap(state: _State, goes: int, comes: int) -> None:
    batch = state.iterations.shape[1]
    state.places[goes], state.places[comes] = state.places[comes], state.places[goes]
    for pack, left in ((comes, goes), (goes, comes)):
        iteration = state.places[pack] // batch
        state.iterations[iteration, state.places[pack] % batch] = pack
        for kind in range(state.has.shape[1]):
            state.held[iteration, kind] += int(state.has[pack, kind]) - int(state.has[left, kind])
