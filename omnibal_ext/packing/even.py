"""Packs that cost the same: samples change packs until each pack is near the mean in every part's seconds.

    two packs meet         a b c d | e f g h       4 + 3 seconds of vision and 5 + 6 of language
    exchange runs of both  a g h d | e f b c       3.5 + 3.5 and 5.5 + 5.5, both within all budgets

Where packs cost the same nobody waits, whichever packs an iteration takes: so it can take those that teach. A rank's
packs make up for each other, so where it runs several in an iteration only those far from the others are evened.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.packs import Packs, offsets_of
from omnibal_ext.packing.random_bits import below
from omnibal_ext.packing.twins import LOOKS_A_SECOND, MOST_LOOKS, in_order_of_the_fullest, swap_twins

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

STEPS_A_SECOND = 400_000_000  # exchanges that are looked at
LEAST_STEPS, MOST_STEPS = 512, 60_000  # of a pack: fewer are not worth the while, more bring next to nothing
LISTED = 8  # steps that it takes to list a run
DRAWN = 12  # samples of each pack that may be exchanged when two meet
RUNS = DRAWN * (DRAWN + 1) // 2 + 1
MET = 4  # packs of which the furthest away is met
QUIET = 40  # meetings that better nothing, for each pack, after which packs are as even as they get
EVEN = 1e-5  # distance from even, in seconds of a mean pack, at which two packs have no need to meet
ROUNDS = 2  # of meetings and of twins
MADE_UP_FOR = 0.014  # the same, where a rank runs other packs in the same iteration


class _State(NamedTuple):
    """Who is where: the samples of each pack are a chain."""

    first: Ints  # [P] sample
    behind: Ints  # [N] the next sample of the pack, or -1
    owners: Ints  # [N] pack
    counts: Ints  # [P] samples
    sums: Floats  # [P, parts] seconds
    loads: Ints  # [P, K]


class _Runs(NamedTuple):
    """Samples drawn of a pack, in a random order, and what each run of it adds up to; the first run is empty."""

    drawn: Ints  # [DRAWN] samples
    ends: Ints  # [RUNS, 2] of each run: the place of its first sample, and behind its last one
    seconds: Floats  # [RUNS, parts]
    loads: Ints  # [RUNS, K]
    order: Ints  # [RUNS] runs in ascending order of the fullest size


def worth_evening(packs: Packs, effort: float) -> bool:
    """Whether there are packs to meet, and time for each of them to do so."""
    return len(packs) > 1 and effort * STEPS_A_SECOND >= LEAST_STEPS * len(packs)


def even_packs(
    packs: Packs, sizes: Ints, budgets: Ints, seconds: Floats, micro_batches: int, seed: int, effort: float = 1.0
) -> Packs:
    """Return as many packs of the same samples, as even in seconds as they get; all within the budgets.

    1. Each pack in turn meets the furthest away of `MET` others, drawn at random.
    2. Up to `DRAWN` samples of each are drawn, in a random order. Of all ways to exchange a run of the one order for a
       run of the other that keep the budgets, the one is taken that leaves the two nearest to each other in all parts.
    3. Repeat until meetings bring nothing any more, or their share of `effort` is spent.
    4. Swap samples that are as long as each other (`twins.py`), and begin again, `ROUNDS` times in all.

    Args:
        sizes: of each sample, [N, K].
        budgets: [K].
        seconds: of each sample, [N, parts]; those of a pack are their sum.
        micro_batches: packs that a rank runs in an iteration; what they make up for among themselves is left as it is.
        effort: nominal seconds; counts steps, so that the same seed gives the same packs anywhere.
    """
    if not worth_evening(packs, effort) or not seconds.any():
        return packs
    costs = seconds * (len(packs) / seconds.sum())
    steps = int(effort * min(STEPS_A_SECOND, MOST_STEPS * len(packs)))
    looks = int(effort * min(LOOKS_A_SECOND, MOST_LOOKS * len(sizes)))
    tolerance = (EVEN if micro_batches == 1 else MADE_UP_FOR) ** 2
    order = in_order_of_the_fullest(sizes, budgets, seed)
    for turn in range(ROUNDS):
        state = _state(packs, costs, sizes)
        _even(costs, sizes, budgets, state, tolerance, seed + turn, steps // ROUNDS)
        owners, sums, loads = state.owners, state.sums, state.loads
        swap_twins(order, costs, sizes, budgets, owners, sums, loads, tolerance, seed + turn, looks // ROUNDS)
        packs = Packs(offsets_of(np.bincount(owners, minlength=len(packs))), np.argsort(owners, kind="stable"))
    return packs


def _state(packs: Packs, costs: Floats, sizes: Ints) -> _State:
    ids, starts = packs.sample_ids, packs.pack_offsets[:-1]
    owners, behind = np.empty(len(ids), np.int64), np.full(len(ids), -1, np.int64)
    owners[ids] = np.repeat(np.arange(len(packs)), packs.counts)
    behind[ids[:-1]] = np.where(owners[ids[:-1]] == owners[ids[1:]], ids[1:], -1)
    sums, loads = np.add.reduceat(costs[ids], starts), np.add.reduceat(sizes[ids], starts)
    return _State(ids[starts], behind, owners, packs.counts, sums, loads)


@numba.njit(cache=True)
def _even(costs: Floats, sizes: Ints, budgets: Ints, state: _State, tolerance: float, seed: int, steps: int) -> None:
    packs = len(state.sums)
    own, others = _no_runs(costs.shape[1], sizes.shape[1]), _no_runs(costs.shape[1], sizes.shape[1])
    looked, quiet, turn = 0, 0, -1
    while looked < steps and quiet < QUIET * packs:
        turn += 1
        quiet += 1
        one = turn % packs
        other = _furthest(state.sums, one, seed, turn)
        looked += state.counts[one] + state.counts[other]
        if _apart(state.sums, one, other) < tolerance:
            continue
        fullest = _fullest(state.loads, budgets, one, other)
        count = _list_runs(costs, sizes, state, one, fullest, own, 2 * (seed + turn))
        other_count = _list_runs(costs, sizes, state, other, fullest, others, 2 * (seed + turn) + 1)
        run, other_run, ways = _best_exchange(budgets, state, (one, other), fullest, own, others, (count, other_count))
        looked += LISTED * (count + other_count) + ways
        if run >= 0:
            quiet = 0
            for place in range(own.ends[run, 0], own.ends[run, 1]):
                _move(costs, sizes, state, own.drawn[place], other)
            for place in range(others.ends[other_run, 0], others.ends[other_run, 1]):
                _move(costs, sizes, state, others.drawn[place], one)


@numba.njit(cache=True)
def _no_runs(parts: int, kinds: int) -> _Runs:
    return _Runs(
        np.zeros(DRAWN, np.int64),
        np.zeros((RUNS, 2), np.int64),
        np.zeros((RUNS, parts)),
        np.zeros((RUNS, kinds), np.int64),
        np.zeros(RUNS, np.int64),
    )


@numba.njit(cache=True)
def _furthest(sums: Floats, one: int, seed: int, turn: int) -> int:
    """Return the one of `MET` other packs, drawn at random, that is furthest away."""
    furthest, most = -1, -1.0
    for number in range(MET):
        other = (one + 1 + below(len(sums) - 1, seed, MET * turn + number)) % len(sums)
        distance = _apart(sums, one, other)
        if distance > most:
            furthest, most = other, distance
    return furthest


@numba.njit(cache=True)
def _apart(sums: Floats, one: int, other: int) -> float:
    """Return the squared distance of each of two packs from their mean."""
    squares = 0.0
    for part in range(sums.shape[1]):
        squares += (sums[one, part] - sums[other, part]) ** 2
    return squares / 4


@numba.njit(cache=True)
def _fullest(loads: Ints, budgets: Ints, one: int, other: int) -> int:
    """Return the size of which two packs have most of the budget."""
    fullest = 0
    for size in range(len(budgets)):
        here, there = loads[one, size] + loads[other, size], loads[one, fullest] + loads[other, fullest]
        if here * budgets[fullest] > there * budgets[size]:
            fullest = size
    return fullest


@numba.njit(cache=True)
def _list_runs(costs: Floats, sizes: Ints, state: _State, pack: int, fullest: int, runs: _Runs, seed: int) -> int:
    """Draw samples of a pack and list their runs; return how many there are.

    All of a pack is a run as well, but never goes for nothing: an empty pack is further from even than any other.
    """
    seen, sample = 0, state.first[pack]
    while sample >= 0:
        place = below(seen + 1, seed, seen)
        if seen < DRAWN:
            runs.drawn[seen] = runs.drawn[place]
        if place < DRAWN:
            runs.drawn[place] = sample
        seen += 1
        sample = state.behind[sample]
    drawn = min(seen, DRAWN)
    count = 1
    for first in range(drawn):
        for last in range(first, drawn):
            before = count - 1 if last > first else 0
            runs.ends[count, 0], runs.ends[count, 1] = first, last + 1
            for part in range(costs.shape[1]):
                runs.seconds[count, part] = runs.seconds[before, part] + costs[runs.drawn[last], part]
            for size in range(sizes.shape[1]):
                runs.loads[count, size] = runs.loads[before, size] + sizes[runs.drawn[last], size]
            count += 1
    for number in range(count):  # few, so by insertion
        place = number
        while place > 0 and runs.loads[runs.order[place - 1], fullest] > runs.loads[number, fullest]:
            runs.order[place] = runs.order[place - 1]
            place -= 1
        runs.order[place] = number
    return count


@numba.njit(cache=True)
def _best_exchange(
    budgets: Ints,
    state: _State,
    pair: tuple[int, int],
    fullest: int,
    own: _Runs,
    others: _Runs,
    counts: tuple[int, int],
) -> tuple[int, int, int]:
    """Return the runs of both packs whose exchange leaves them nearest, or -1; and at how many ways it looked.

    For each run of the one pack, only those runs of the other are looked at that keep the budget of the fullest size.
    """
    one, other = pair
    room, other_room = budgets - state.loads[one], budgets - state.loads[other]
    half = (state.sums[one] - state.sums[other]) / 2
    best, run, other_run = _apart(state.sums, one, other) - EVEN**2, -1, -1
    ways, start = 0, 0
    for number in range(counts[0]):
        gone = own.order[number]
        while start < counts[1] and (
            others.loads[others.order[start], fullest] < own.loads[gone, fullest] - other_room[fullest]
        ):
            start += 1
        for place in range(start, counts[1]):
            come = others.order[place]
            if others.loads[come, fullest] > own.loads[gone, fullest] + room[fullest]:
                break
            ways += 1
            distance = 0.0
            for part in range(len(half)):
                distance += (half[part] - own.seconds[gone, part] + others.seconds[come, part]) ** 2
            if distance >= best:
                continue
            fits = True
            for size in range(len(budgets)):
                moved = others.loads[come, size] - own.loads[gone, size]
                fits &= -other_room[size] <= moved <= room[size]
            if fits:
                best, run, other_run = distance, gone, come
    return run, other_run, ways


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
