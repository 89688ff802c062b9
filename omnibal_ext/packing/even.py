"""Packs that cost the same: samples change packs until each pack is near the mean in every part's seconds.

    two packs meet      a b c d | e f g h       4 + 3 seconds of vision and 5 + 6 of language
    are dealt anew      a f c h | e b g d       3.5 + 3.5 and 5.5 + 5.5, both within all budgets

Where packs cost the same nobody waits, whichever packs an iteration takes: so it can take those that teach.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.packs import Packs, offsets_of
from omnibal_ext.packing.random_bits import below

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

SPLITS_A_SECOND = 200_000_000  # ways to deal that are looked at
HALF = 4  # samples of each pack that are dealt anew
LEAST_SPLITS, MOST_SPLITS = 256, 30_000  # of a pack: fewer are not worth the while, more bring next to nothing
QUIET = 40  # meetings that better nothing, for each pack, after which packs are as even as they get
EVEN = 1e-10  # squared distance from even, in seconds of a mean pack, at which two packs have no need to meet


class _State(NamedTuple):
    """Who is where: the samples of each pack are a chain."""

    first: Ints  # [P] sample
    behind: Ints  # [N] the next sample of the pack, or -1
    owners: Ints  # [N] pack
    counts: Ints  # [P] samples
    sums: Floats  # [P, parts] seconds
    loads: Ints  # [P, K]


def worth_evening(packs: Packs, effort: float) -> bool:
    """Whether there are packs to meet, and time for each of them to do so."""
    return len(packs) > 1 and effort * SPLITS_A_SECOND >= LEAST_SPLITS * len(packs)


def even_packs(packs: Packs, sizes: Ints, budgets: Ints, seconds: Floats, seed: int, effort: float = 1.0) -> Packs:
    """Return as many packs of the same samples, as even in seconds as they get; all within the budgets.

    1. Each pack in turn meets the further away of two others, drawn at random.
    2. Up to `HALF` samples of each, drawn at random, are split between both in the way that leaves the two nearest to
       each other in all parts, of all ways that keep the budgets.
    3. Repeat until meetings bring nothing any more, or `effort` is spent.

    Args:
        sizes: of each sample, [N, K].
        budgets: [K].
        seconds: of each sample, [N, parts]; those of a pack are their sum.
        effort: nominal seconds; counts steps, so that the same seed gives the same packs anywhere.
    """
    if not worth_evening(packs, effort) or not seconds.any():
        return packs
    ids, starts = packs.sample_ids, packs.pack_offsets[:-1]
    owners, behind = np.empty(len(ids), np.int64), np.full(len(ids), -1, np.int64)
    owners[ids] = np.repeat(np.arange(len(packs)), packs.counts)
    behind[ids[:-1]] = np.where(owners[ids[:-1]] == owners[ids[1:]], ids[1:], -1)
    costs = seconds * (len(packs) / seconds.sum())
    sums, loads = np.add.reduceat(costs[ids], starts), np.add.reduceat(sizes[ids], starts)
    state = _State(ids[starts], behind, owners, packs.counts, sums, loads)
    steps = effort * min(SPLITS_A_SECOND, MOST_SPLITS * len(packs))
    _even(costs, sizes, budgets, state, seed, int(steps))
    return Packs(offsets_of(np.bincount(owners, minlength=len(packs))), np.argsort(owners, kind="stable"))


@numba.njit(cache=True)
def _even(costs: Floats, sizes: Ints, budgets: Ints, state: _State, seed: int, steps: int) -> None:
    packs = len(state.sums)
    drawn = np.empty(2 * HALF, np.int64)
    looked, quiet, turn = 0, 0, -1
    while looked < steps and quiet < QUIET * packs:
        turn += 1
        quiet += 1
        one = turn % packs
        other = (one + 1 + below(packs - 1, seed, 2 * turn)) % packs
        rival = (one + 1 + below(packs - 1, seed, 2 * turn + 1)) % packs
        if _apart(state.sums, one, rival) > _apart(state.sums, one, other):
            other = rival
        looked += state.counts[one] + state.counts[other]
        if _apart(state.sums, one, other) < EVEN:
            continue
        own = _draw(state, one, drawn, 0, seed + turn)
        count = own + _draw(state, other, drawn, own, seed - turn)
        looked += 1 << count
        split = _best_split(costs, sizes, budgets, state, (one, other), drawn[:count], own)
        if split >= 0:
            quiet = 0
            for place in range(count):
                to_one = (split >> place) & 1 == 1
                if to_one != (place < own):
                    _move(costs, sizes, state, drawn[place], one if to_one else other)


@numba.njit(cache=True)
def _apart(sums: Floats, one: int, other: int) -> float:
    """Return the squared distance of each of two packs from their mean."""
    squares = 0.0
    for part in range(sums.shape[1]):
        squares += (sums[one, part] - sums[other, part]) ** 2
    return squares / 4


@numba.njit(cache=True)
def _draw(state: _State, pack: int, drawn: Ints, start: int, seed: int) -> int:
    """Write up to `HALF` samples of a pack into `drawn`, any as likely as the others; return how many."""
    seen, sample = 0, state.first[pack]
    while sample >= 0:
        place = seen if seen < HALF else below(seen + 1, seed, seen)
        if place < HALF:
            drawn[start + place] = sample
        seen += 1
        sample = state.behind[sample]
    return min(seen, HALF)


@numba.njit(cache=True)
def _best_split(
    costs: Floats, sizes: Ints, budgets: Ints, state: _State, pair: tuple[int, int], drawn: Ints, own: int
) -> int:
    """Return which of `drawn` the first pack should have, as bits, so that both are nearest; -1: as it has.

    The first `own` ones are the first pack's now. Ways follow each other in Gray's order: one sample changes sides.
    No pack ends up empty: nothing is further from even.
    """
    one, other = pair
    middle, in_all = (state.sums[one] + state.sums[other]) / 2, state.loads[one] + state.loads[other]
    seconds, load = state.sums[one].copy(), state.loads[one].copy()
    bits = (1 << own) - 1
    best, best_bits = _apart(state.sums, one, other) - EVEN, -1
    for way in range(1, 1 << len(drawn)):
        place = 0
        while not (way >> place) & 1:
            place += 1
        bits ^= 1 << place
        sign = 1 if (bits >> place) & 1 else -1
        distance = 0.0
        for part in range(len(seconds)):
            seconds[part] += sign * costs[drawn[place], part]
            distance += (seconds[part] - middle[part]) ** 2
        fits = True
        for size in range(len(load)):
            load[size] += sign * sizes[drawn[place], size]
            fits &= load[size] <= budgets[size] and in_all[size] - load[size] <= budgets[size]
        if fits and distance < best:
            best, best_bits = distance, bits
    return best_bits


@numba.njit(cache=True)
def _move(costs: Floats, sizes: Ints, state: _State, sample: int, to: int) -> None:
    """Take a sample out of its pack and put it in front of another one's."""
    pack, before = state.owners[sample], -1
    while (state.first[pack] if before < 0 else state.behind[before]) != sample:
        before = state.first[pack] if before < 0 else state.behind[before]
    if before < 0:
        state.first[pack] = state.behind[sample]
    else:
        state.behind[before] = state.behind[sample]
    state.behind[sample], state.first[to] = state.first[to], sample
    state.owners[sample] = to
    for end, sign in ((pack, -1), (to, 1)):
        state.counts[end] += sign
        state.sums[end] += sign * costs[sample]
        state.loads[end] += sign * sizes[sample]
