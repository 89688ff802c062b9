"""Equalize the seconds of packs, or of ranks with several packs, by exchanging samples between packs.

    two packs                   a b c d | e f g h     4 + 3 seconds of vision, 5 + 6 of language
    exchange "b c" for "g h"    a g h d | e f b c     3.5 + 3.5 and 5.5 + 5.5, all within the budgets

Ranks of equal seconds do not wait for each other, whichever of them share an iteration; so iterations can be chosen to
look like the corpus. Packs on one rank are summed, so ranks can be equal where packs cannot.
"""

from typing import NamedTuple

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.assignment import Assignment, assignment_of, move_sample, packs_of
from omnibal_ext.packing.packs import PackList, offsets_of
from omnibal_ext.packing.random_bits import below

STEPS_A_SECOND = 400_000_000  # exchanges tried per nominal second
LEAST_STEPS, MOST_STEPS = 512, 60_000  # per pack: fewer are useless, more change next to nothing
LISTED = 8  # cost of listing a segment, in steps
DRAWN = 12  # samples of each pack considered in one exchange
SEGMENTS = DRAWN * (DRAWN + 1) // 2 + 1
CANDIDATES = 4  # packs drawn for each exchange; the one whose rank differs most is used
FEW_STEPS, OF_FEW = 10_000, 64  # per pack; with fewer steps so many are drawn, to spend them on packs that differ most
PATIENCE = 40  # stop after so many tries per pack without an improvement
TOLERANCE = 1e-5  # pairs of ranks this near to their mean are skipped, in seconds of a mean rank


class _Chains(NamedTuple):
    """Samples of each pack as a linked list."""

    first: Ints  # [P] first sample
    following: Ints  # [N] next sample of the same pack, or -1


class _Segments(NamedTuple):
    """Samples drawn from a pack, and the sums over each contiguous segment of them; segment 0 is empty."""

    drawn: Ints  # [DRAWN] samples
    ends: Ints  # [SEGMENTS, 2] half-open range of positions in `drawn`
    seconds: Floats  # [SEGMENTS, parts]
    loads: Ints  # [SEGMENTS, K]
    order: Ints  # [SEGMENTS] segments by the fullest size, ascending


def worth_equalizing(packs: PackList, effort: float) -> bool:
    """Say whether there are two packs or more, and `effort` (nominal seconds) gives each enough steps to help."""
    return len(packs) > 1 and effort * STEPS_A_SECOND >= LEAST_STEPS * len(packs)


def equalize_packs(
    packs: PackList,
    sizes: Ints,
    budgets: Ints,
    seconds: Floats,
    ranks: Ints,
    exchange_groups: Ints,
    seed: int,
    effort: float = 1.0,
    other_seconds: Floats | None = None,
) -> PackList:
    """Exchange samples between packs until ranks are as equal in seconds as possible; no budget is exceeded.

    1. For each pack in turn, draw `CANDIDATES` packs of its exchange group, `OF_FEW` where effort is scarce; take the
       one whose rank's seconds differ most.
    2. List contiguous segments of up to `DRAWN` samples of either pack, in random order or by size. Exchange the pair
       of segments within budgets that makes the two ranks most equal, summed over parts, each relative to its mean.
    3. Stop when exchanges no longer help, or `effort` is spent.

    Args:
        sizes: of each sample, [N, K].
        budgets: [K].
        seconds: of each sample, [N, parts]; those of a rank are the sum over its samples.
        ranks: rank of each pack, numbered through all iterations, [P]; packs of rank -1 are unchanged.
        exchange_groups: number of each pack, ascending, [P]; only packs of equal number exchange samples.
        effort: number of steps, given in nominal seconds: a seed gives the same packs on any machine.
        other_seconds: seconds of each rank outside these packs, [ranks, parts].

    Returns:
        As many packs, of the same samples.
    """
    ids, running = packs.sample_ids, ranks >= 0
    assignment, costs = assignment_of(packs, sizes[ids], ranks, exchange_groups), seconds[ids]
    sums = np.zeros((int(ranks.max()) + 1, costs.shape[1])) if other_seconds is None else other_seconds.copy()
    np.add.at(sums, ranks[running], np.add.reduceat(costs, packs.pack_offsets[:-1])[running])
    if not sums.any():
        return packs
    means = sums.mean(axis=0)
    units = 1 / np.where(means > 0, means, 1.0) / len(means)  # every part of the model weighs the same
    _, first, numbers, counts = np.unique(exchange_groups, return_index=True, return_inverse=True, return_counts=True)
    groups = np.column_stack([first, counts])[numbers]
    steps = int(effort * min(STEPS_A_SECOND, MOST_STEPS * len(packs)))
    candidates = OF_FEW if steps < FEW_STEPS * len(packs) else CANDIDATES
    arguments = costs * units, sizes[ids], budgets, _chains(assignment), assignment, sums * units, groups
    _equalize(*arguments, seed, steps, candidates)
    return packs_of(assignment, ids)


def _chains(assignment: Assignment) -> _Chains:
    owners, starts = assignment.pack_of, offsets_of(assignment.counts)[:-1]  # samples are ordered by pack at first
    following = np.arange(1, len(owners) + 1)
    following[np.append(owners[1:] != owners[:-1], True)] = -1
    return _Chains(starts, following)


@numba.njit(cache=True)
def _equalize(
    costs: Floats,
    sizes: Ints,
    budgets: Ints,
    chains: _Chains,
    assignment: Assignment,
    sums: Floats,
    groups: Ints,
    seed: int,
    steps: int,
    candidates: int,
) -> None:
    """Exchange samples between packs, in place, until that no longer helps or `steps` are spent.

    Args:
        sums: seconds of ranks, [R, parts].
        groups: first pack and size of each pack's exchange group, [P, 2].
    """
    packs = len(assignment.counts)
    of_one, of_other = (
        _empty_segments(costs.shape[1], sizes.shape[1]),
        _empty_segments(costs.shape[1], sizes.shape[1]),
    )
    looked, quiet, turn = 0, 0, -1
    while looked < steps and quiet < PATIENCE * packs:
        turn += 1
        quiet += 1
        one = turn % packs
        other = _furthest(assignment, sums, groups[one], one, seed, turn, candidates)
        if other < 0:
            continue
        looked += assignment.counts[one] + assignment.counts[other]
        if _distance(sums, assignment.rank_of[one], assignment.rank_of[other]) < TOLERANCE**2:
            continue
        fullest = _fullest(assignment.loads, budgets, one, other)
        count = _list_segments(costs, sizes, chains, one, fullest, of_one, 2 * (seed + turn))
        other_count = _list_segments(costs, sizes, chains, other, fullest, of_other, 2 * (seed + turn) + 1)
        segment, other_segment, tried = _best_exchange(
            budgets, assignment, sums, (one, other), fullest, of_one, of_other, (count, other_count)
        )
        looked += LISTED * (count + other_count) + tried
        if segment >= 0:
            quiet = 0
            for position in range(of_one.ends[segment, 0], of_one.ends[segment, 1]):
                _move(costs, sizes, chains, assignment, sums, of_one.drawn[position], other)
            for position in range(of_other.ends[other_segment, 0], of_other.ends[other_segment, 1]):
                _move(costs, sizes, chains, assignment, sums, of_other.drawn[position], one)


@numba.njit(cache=True)
def _empty_segments(parts: int, kinds: int) -> _Segments:
    return _Segments(
        np.zeros(DRAWN, np.int64),
        np.zeros((SEGMENTS, 2), np.int64),
        np.zeros((SEGMENTS, parts)),
        np.zeros((SEGMENTS, kinds), np.int64),
        np.zeros(SEGMENTS, np.int64),
    )


@numba.njit(cache=True)
def _furthest(
    assignment: Assignment, sums: Floats, group: Ints, one: int, seed: int, turn: int, candidates: int
) -> int:
    """Return, of `candidates` random packs of the group, that whose rank differs most in seconds; -1: none differs."""
    furthest, most, rank = -1, -1.0, assignment.rank_of[one]
    start, count = group
    if rank < 0 or count < 2:
        return furthest
    for number in range(candidates):
        other = start + (one - start + 1 + below(count - 1, seed, candidates * turn + number)) % count
        if assignment.rank_of[other] < 0 or assignment.rank_of[other] == rank:
            continue
        distance = _distance(sums, rank, assignment.rank_of[other])
        if distance > most:
            furthest, most = other, distance
    return furthest


@numba.njit(cache=True)
def _distance(sums: Floats, one: int, other: int) -> float:
    """Return the squared distance of either rank from the mean of the two."""
    squares = 0.0
    for part in range(sums.shape[1]):
        squares += (sums[one, part] - sums[other, part]) ** 2
    return squares / 4


@numba.njit(cache=True)
def _fullest(loads: Ints, budgets: Ints, one: int, other: int) -> int:
    """Return the index of the size that uses most of its budget in two packs together."""
    fullest = 0
    for size in range(len(budgets)):
        here, there = loads[one, size] + loads[other, size], loads[one, fullest] + loads[other, fullest]
        if here * budgets[fullest] > there * budgets[size]:
            fullest = size
    return fullest


@numba.njit(cache=True)
def _list_segments(
    costs: Floats, sizes: Ints, chains: _Chains, pack: int, fullest: int, segments: _Segments, seed: int
) -> int:
    """Draw samples of a pack and write their contiguous segments into `segments`; return how many."""
    seen, sample = 0, chains.first[pack]
    while sample >= 0:
        position = below(seen + 1, seed, seen)
        if seen < DRAWN:
            segments.drawn[seen] = segments.drawn[position]
        if position < DRAWN:
            segments.drawn[position] = sample
        seen += 1
        sample = chains.following[sample]
    drawn = min(seen, DRAWN)
    if seen <= DRAWN and below(2, seed, seen) == 0:
        _sort(segments.drawn[:drawn], sizes[:, fullest])
    count = 1
    for first in range(drawn):
        for last in range(first, drawn):
            before = count - 1 if last > first else 0
            segments.ends[count, 0], segments.ends[count, 1] = first, last + 1
            for part in range(costs.shape[1]):
                segments.seconds[count, part] = segments.seconds[before, part] + costs[segments.drawn[last], part]
            for size in range(sizes.shape[1]):
                segments.loads[count, size] = segments.loads[before, size] + sizes[segments.drawn[last], size]
            count += 1
    segments.order[:count] = np.arange(count)
    _sort(segments.order[:count], segments.loads[:, fullest])
    return count


@numba.njit(cache=True)
def _sort(numbers: Ints, values: Ints) -> None:
    """Sort `numbers` in place by insertion, ascending by `values[number]`."""
    for end in range(len(numbers)):
        number, position = numbers[end], end
        while position > 0 and values[numbers[position - 1]] > values[number]:
            numbers[position] = numbers[position - 1]
            position -= 1
        numbers[position] = number


@numba.njit(cache=True)
def _best_exchange(
    budgets: Ints,
    assignment: Assignment,
    sums: Floats,
    pair: tuple[int, int],
    fullest: int,
    of_one: _Segments,
    of_other: _Segments,
    counts: tuple[int, int],
) -> tuple[int, int, int]:
    """Return which segment of either pack to exchange so that their ranks become most equal (-1, -1: none helps), and
    how many pairs were tried.

    Segments are sorted by the fullest size, so only pairs that keep its budget are tried.
    """
    one, other = pair
    room, other_room = budgets - assignment.loads[one], budgets - assignment.loads[other]
    rank, other_rank = assignment.rank_of[one], assignment.rank_of[other]
    half = (sums[rank] - sums[other_rank]) / 2
    best, segment, other_segment = _distance(sums, rank, other_rank) - TOLERANCE**2, -1, -1
    tried, start = 0, 0
    for number in range(counts[0]):
        out = of_one.order[number]
        while start < counts[1] and (
            of_other.loads[of_other.order[start], fullest] < of_one.loads[out, fullest] - other_room[fullest]
        ):
            start += 1
        for position in range(start, counts[1]):
            into = of_other.order[position]
            if of_other.loads[into, fullest] > of_one.loads[out, fullest] + room[fullest]:
                break
            tried += 1
            distance = 0.0
            for part in range(len(half)):
                distance += (half[part] - of_one.seconds[out, part] + of_other.seconds[into, part]) ** 2
            if distance >= best:
                continue
            more = (of_other.ends[into, 1] - of_other.ends[into, 0]) - (of_one.ends[out, 1] - of_one.ends[out, 0])
            fits = -assignment.counts[one] < more < assignment.counts[other]  # no pack is left empty
            for size in range(len(budgets)):
                moved = of_other.loads[into, size] - of_one.loads[out, size]
                fits &= -other_room[size] <= moved <= room[size]
            if fits:
                best, segment, other_segment = distance, out, into
    return segment, other_segment, tried


@numba.njit(cache=True)
def _move(
    costs: Floats, sizes: Ints, chains: _Chains, assignment: Assignment, sums: Floats, sample: int, to: int
) -> None:
    """Move a sample to the front of another pack, in place, with its seconds."""
    pack, before = assignment.pack_of[sample], -1
    while (chains.first[pack] if before < 0 else chains.following[before]) != sample:
        before = chains.first[pack] if before < 0 else chains.following[before]
    if before < 0:
        chains.first[pack] = chains.following[sample]
    else:
        chains.following[before] = chains.following[sample]
    chains.following[sample], chains.first[to] = chains.first[to], sample
    move_sample(assignment, sizes, sample, to)
    sums[assignment.rank_of[pack]] -= costs[sample]
    sums[assignment.rank_of[to]] += costs[sample]
