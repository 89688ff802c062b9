"""Packs, and ranks of several packs, that cost the same: samples change packs until each is near the mean in seconds.

    two packs meet         a b c d | e f g h       4 + 3 seconds of vision and 5 + 6 of language
    exchange runs of both  a g h d | e f b c       3.5 + 3.5 and 5.5 + 5.5, both within all budgets

Where ranks cost the same nobody waits, whichever ranks an iteration takes: so it can take those that teach. Packs of
one rank make up for each other, so that ranks are even where packs cannot be.
"""

from typing import NamedTuple

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.places import Places, packs_of, places_of, put
from omnibal_ext.packing.packs import Packs, offsets_of
from omnibal_ext.packing.random_bits import below

STEPS_A_SECOND = 400_000_000  # exchanges that are looked at
LEAST_STEPS, MOST_STEPS = 512, 60_000  # of a pack: fewer are not worth the while, more bring next to nothing
LISTED = 8  # steps that it takes to list a run
DRAWN = 12  # samples of each pack that may be exchanged when two meet
RUNS = DRAWN * (DRAWN + 1) // 2 + 1
MET = 4  # packs of which the furthest away is met
QUIET = 40  # meetings that better nothing, for each pack, after which packs are as even as they get
EVEN = 1e-5  # distance from even, in seconds of a mean rank, at which two ranks are left alone


class _Chains(NamedTuple):
    """The samples of each pack, one after the other."""

    first: Ints  # [P] sample
    behind: Ints  # [N] the next sample of the pack, or -1


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
    packs: Packs,
    sizes: Ints,
    budgets: Ints,
    seconds: Floats,
    ranks: Ints,
    kin: Ints,
    seed: int,
    effort: float = 1.0,
    ahead: Floats | None = None,
) -> Packs:
    """Return as many packs of the same samples, whose ranks are as even in seconds as they get; all within the budgets.

    1. Each pack in turn meets one of `MET` others, drawn at random: that whose rank is furthest away from its own.
    2. Up to `DRAWN` samples of each are drawn, in a random order or by size, so that many small ones go together. Of
       all ways to exchange a run of the one order for a run of the other that keep the budgets, the one is taken that
       leaves the two ranks nearest to each other in all parts, each as a share of its mean.
    3. Repeat until meetings bring nothing any more, or `effort` is spent.

    Args:
        sizes: of each sample, [N, K].
        budgets: [K].
        seconds: of each sample, [N, parts]; those of a rank are their sum.
        ranks: which runs each pack, counted through all iterations, [P]; -1 leaves a pack as it is.
        kin: number of each pack, ascending; only packs of the same number exchange samples, [P].
        effort: nominal seconds; counts steps, so that the same seed gives the same packs anywhere.
        ahead: seconds that each rank has beside these packs, [ranks, parts].
    """
    ids, run = packs.sample_ids, ranks >= 0
    places, costs = places_of(packs, sizes[ids], ranks, kin), seconds[ids]
    sums = np.zeros((int(ranks.max()) + 1, costs.shape[1])) if ahead is None else ahead.copy()
    np.add.at(sums, ranks[run], np.add.reduceat(costs, packs.pack_offsets[:-1])[run])
    if not sums.any():
        return packs
    means = sums.mean(axis=0)
    units = 1 / np.where(means > 0, means, 1.0) / len(means)  # all parts count the same
    _, first, numbers, counts = np.unique(kin, return_index=True, return_inverse=True, return_counts=True)
    among = np.column_stack([first, counts])[numbers]
    steps = int(effort * min(STEPS_A_SECOND, MOST_STEPS * len(packs)))
    _even(costs * units, sizes[ids], budgets, _chains(places), places, sums * units, among, seed, steps)
    return packs_of(places, ids)


def _chains(places: Places) -> _Chains:
    owners, starts = places.owners, offsets_of(places.counts)[:-1]  # samples stand pack by pack at first
    behind = np.arange(1, len(owners) + 1)
    behind[np.append(owners[1:] != owners[:-1], True)] = -1
    return _Chains(starts, behind)


@numba.njit(cache=True)
def _even(
    costs: Floats,
    sizes: Ints,
    budgets: Ints,
    chains: _Chains,
    places: Places,
    sums: Floats,
    among: Ints,
    seed: int,
    steps: int,
) -> None:
    """Let packs meet; `sums` [R, parts] are of ranks, `among` [P, 2] says where a pack's kin stand and how many."""
    packs = len(places.counts)
    own, others = _no_runs(costs.shape[1], sizes.shape[1]), _no_runs(costs.shape[1], sizes.shape[1])
    looked, quiet, turn = 0, 0, -1
    while looked < steps and quiet < QUIET * packs:
        turn += 1
        quiet += 1
        one = turn % packs
        other = _furthest(places, sums, among[one], one, seed, turn)
        if other < 0:
            continue
        looked += places.counts[one] + places.counts[other]
        if _apart(sums, places.ranks[one], places.ranks[other]) < EVEN**2:
            continue
        fullest = _fullest(places.loads, budgets, one, other)
        count = _list_runs(costs, sizes, chains, one, fullest, own, 2 * (seed + turn))
        other_count = _list_runs(costs, sizes, chains, other, fullest, others, 2 * (seed + turn) + 1)
        run, other_run, ways = _best_exchange(
            budgets, places, sums, (one, other), fullest, own, others, (count, other_count)
        )
        looked += LISTED * (count + other_count) + ways
        if run >= 0:
            quiet = 0
            for place in range(own.ends[run, 0], own.ends[run, 1]):
                _move(costs, sizes, chains, places, sums, own.drawn[place], other)
            for place in range(others.ends[other_run, 0], others.ends[other_run, 1]):
                _move(costs, sizes, chains, places, sums, others.drawn[place], one)


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
def _furthest(places: Places, sums: Floats, kin: Ints, one: int, seed: int, turn: int) -> int:
    """Return the one of `MET` packs of its kin, drawn at random, whose rank is furthest from its own; -1 if none is."""
    furthest, most, rank = -1, -1.0, places.ranks[one]
    start, among = kin
    if rank < 0 or among < 2:
        return furthest
    for number in range(MET):
        other = start + (one - start + 1 + below(among - 1, seed, MET * turn + number)) % among
        if places.ranks[other] < 0 or places.ranks[other] == rank:
            continue
        distance = _apart(sums, rank, places.ranks[other])
        if distance > most:
            furthest, most = other, distance
    return furthest


@numba.njit(cache=True)
def _apart(sums: Floats, one: int, other: int) -> float:
    """Return the squared distance of each of two ranks from their mean."""
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
def _list_runs(costs: Floats, sizes: Ints, chains: _Chains, pack: int, fullest: int, runs: _Runs, seed: int) -> int:
    """Draw samples of a pack and list their runs; return how many there are."""
    seen, sample = 0, chains.first[pack]
    while sample >= 0:
        place = below(seen + 1, seed, seen)
        if seen < DRAWN:
            runs.drawn[seen] = runs.drawn[place]
        if place < DRAWN:
            runs.drawn[place] = sample
        seen += 1
        sample = chains.behind[sample]
    drawn = min(seen, DRAWN)
    if seen <= DRAWN and below(2, seed, seen) == 0:
        _sort(runs.drawn[:drawn], sizes[:, fullest])
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
    runs.order[:count] = np.arange(count)
    _sort(runs.order[:count], runs.loads[:, fullest])
    return count


@numba.njit(cache=True)
def _sort(numbers: Ints, values: Ints) -> None:
    """Put few numbers into the ascending order of their values, by insertion."""
    for end in range(len(numbers)):
        number, place = numbers[end], end
        while place > 0 and values[numbers[place - 1]] > values[number]:
            numbers[place] = numbers[place - 1]
            place -= 1
        numbers[place] = number


@numba.njit(cache=True)
def _best_exchange(
    budgets: Ints,
    places: Places,
    sums: Floats,
    pair: tuple[int, int],
    fullest: int,
    own: _Runs,
    others: _Runs,
    counts: tuple[int, int],
) -> tuple[int, int, int]:
    """Return the runs of two packs whose exchange leaves their ranks nearest, or -1; and at how many ways it looked.

    For each run of the one pack, only those runs of the other are looked at that keep the budget of the fullest size.
    """
    one, other = pair
    room, other_room = budgets - places.loads[one], budgets - places.loads[other]
    rank, other_rank = places.ranks[one], places.ranks[other]
    half = (sums[rank] - sums[other_rank]) / 2
    best, run, other_run = _apart(sums, rank, other_rank) - EVEN**2, -1, -1
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
            more = (others.ends[come, 1] - others.ends[come, 0]) - (own.ends[gone, 1] - own.ends[gone, 0])
            fits = -places.counts[one] < more < places.counts[other]  # no pack is left empty
            for size in range(len(budgets)):
                moved = others.loads[come, size] - own.loads[gone, size]
                fits &= -other_room[size] <= moved <= room[size]
            if fits:
                best, run, other_run = distance, gone, come
    return run, other_run, ways


@numba.njit(cache=True)
def _move(costs: Floats, sizes: Ints, chains: _Chains, places: Places, sums: Floats, sample: int, to: int) -> None:
    """Take a sample out of its pack and put it in front of another one's."""
    pack, before = places.owners[sample], -1
    while (chains.first[pack] if before < 0 else chains.behind[before]) != sample:
        before = chains.first[pack] if before < 0 else chains.behind[before]
    if before < 0:
        chains.first[pack] = chains.behind[sample]
    else:
        chains.behind[before] = chains.behind[sample]
    chains.behind[sample], chains.first[to] = chains.first[to], sample
    put(places, sizes, sample, to)
    sums[places.ranks[pack]] -= costs[sample]
    sums[places.ranks[to]] += costs[sample]
