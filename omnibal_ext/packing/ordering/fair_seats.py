"""Iterations that all hold their share of wide packs, and whose ranks are level: narrow samples fill what those leave.

    4 ranks, 5 seats each            seconds
    rank 0   A  A' c  -  -           3.3 + 1 + .7
    rank 1   A  A' c' -  -           3.3 + 1 + .7
    rank 2   d  e  f  g  h           1 + 1 + 1 + 1 + 1
    rank 3   i  j  k  l  m           1 + 1 + 1 + 1 + 1

A rank that runs much of a wide pack runs fewer samples beside it. Wide packs are dealt first; then sample after sample
goes to the rank that has least to do. Where ranks waited for more than may be, narrow packs meet then and exchange
samples (`even_packs.py`).
"""

import heapq
from typing import NamedTuple

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.even_packs import even_packs
from omnibal_ext.packing.ordering.seats import EMPTY_SEAT, Seated, Table, deal_tables
from omnibal_ext.packing.packs import Packs, offsets_of

FULL = 0.985  # of what a rank's narrow packs hold, as samples are dealt without a look at how they fill packs
LESS = 0.985  # so many times as full, where samples found no room
TRIES = 16  # so often
CLOSED = 0.015  # of a budget: a rank whose packs have no more room is full
LOOKED = 64  # ranks with room for a sample are looked for among so many


class Wide(NamedTuple):
    """Packs wider than a rank."""

    packs: Packs
    widths: Ints  # [P]
    seconds: Floats  # [P, parts] of the fullest share


class Narrow(NamedTuple):
    """Samples that fit one rank."""

    ids: Ints  # [N]
    sizes: Ints  # [N, K] those that have a budget
    budgets: Ints  # [K]
    seconds: Floats  # [N, parts]


def fair_iterations(
    wide: Wide, narrow: Narrow, data_parallel_size: int, micro_batches: int, seed: int, effort: float
) -> Seated | None:
    """Put wide packs and narrow samples into iterations; None if a narrow sample finds no room in many of them.

    1. As few iterations as full narrow packs on all other ranks allow.
    2. Wide packs, the widest and of these the dearest first, go to the iteration with least wide work so far, there to
       the team with least to do.
    3. An iteration takes as long as its fullest rank by then, and no less than makes up for all the work.
    4. Samples, the dearest first, go to the rank of any iteration that lacks most of that, and has room. If one finds
       none, again with packs less full: more of them, in more iterations.
    5. Narrow packs exchange samples until ranks are even, for nominal seconds of `effort`.
    """
    shares = (narrow.sizes / np.maximum(narrow.budgets, 1)).sum(axis=0)
    full = float(narrow.seconds.sum() / max(shares.max(initial=0.0), 1e-9))
    work = float((wide.seconds.sum(axis=1) * wide.widths).sum() + narrow.seconds.sum())
    each = FULL * full
    for _ in range(TRIES):
        iterations = max(1, int(np.ceil(work / (data_parallel_size * micro_batches * each))))
        tables = deal_tables(wide.seconds, wide.widths, iterations, data_parallel_size, micro_batches)
        if tables and (found := _fill(tables, narrow, work, each, seed)):
            return _seated(found, wide, narrow, seed, effort)
        each *= LESS
    return None


def _lengths(fullest: Floats, work: float) -> Floats:
    """Return how long iterations take, [I]: as long as the fullest rank, all others alike; together they are `work`."""
    low, high = 0.0, max(float(fullest.max()), work / len(fullest))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(fullest, middle).sum() < work else (low, middle)
    return np.maximum(fullest, high)


class _Filled(NamedTuple):
    """Narrow packs, and the seats they take beside wide ones."""

    packs: Packs  # of places in `Narrow`
    ranks: Ints  # [P] iteration x D + rank that runs it
    ahead: Floats  # [I * D, parts] seconds that a rank has beside them
    seats: Ints  # [I, D, M] wide packs' numbers; narrow ones count on behind them


def _fill(tables: list[Table], narrow: Narrow, work: float, each: float, seed: int) -> _Filled | None:
    """Deal the narrow samples over the seats that are left, to packs of `each` seconds about."""
    seats = np.stack([table.seats for table in tables])
    of_parts = np.stack([table.seconds for table in tables])
    done = of_parts.sum(axis=2)
    lacking = (_lengths(done.max(axis=1), work / seats.shape[1])[:, None] - done).ravel()
    free = seats.shape[2] - np.stack([table.taken for table in tables]).ravel()
    packs = np.minimum(free, np.ceil(lacking.clip(0) / each).astype(np.int64))
    first = offsets_of(packs)
    random = np.random.default_rng(seed).permutation(len(narrow.ids))
    order = random[np.argsort(-narrow.seconds[random].sum(axis=1), kind="stable")]
    turns = np.random.default_rng((seed, 1)).permutation(len(packs))  # equal ranks take turns in any order
    owners = _deal(order, narrow.sizes, narrow.budgets, narrow.seconds.sum(axis=1), -lacking, first, turns)
    if len(owners) == 0:
        return None
    counts = np.bincount(owners, minlength=first[-1])
    filled = np.flatnonzero(counts)
    number = np.full(first[-1], EMPTY_SEAT)
    number[filled] = int(seats.max(initial=-1)) + 1 + np.arange(len(filled))
    rows = seats.reshape(-1, seats.shape[2])
    of_rank = np.repeat(np.arange(len(packs)), packs)
    rows[of_rank, (seats.shape[2] - free)[of_rank] + np.arange(first[-1]) - first[of_rank]] = number
    own = Packs(offsets_of(counts[filled]), np.argsort(owners, kind="stable"))
    return _Filled(own, of_rank[filled], _ahead(of_parts, narrow.seconds), rows.reshape(seats.shape))


def _ahead(done: Floats, narrow: Floats) -> Floats:
    """Return what ranks have done of their iteration's length in each part, [I * D, parts]; short ones begin later.

    Args:
        done: seconds of wide packs, [I, D, parts].
        narrow: of samples, [N, parts].
    """
    each = (done.sum(axis=(0, 1)) + narrow.sum(axis=0)) / done.shape[1]
    lengths = [_lengths(part, work) for part, work in zip(done.max(axis=1).T, each, strict=True)]
    missing = np.stack(lengths, axis=1)[:, None] - done
    ahead: Floats = (missing.max(axis=(0, 1)) - missing).reshape(-1, done.shape[2])
    return ahead


def _seated(found: _Filled, wide: Wide, narrow: Narrow, seed: int, effort: float) -> Seated:
    """Even the narrow packs of ranks, and seat all packs."""
    one_kin = np.zeros(len(found.packs), np.int64)
    given = narrow.sizes, narrow.budgets, narrow.seconds, found.ranks, one_kin, seed, effort
    even = even_packs(found.packs, *given, ahead=found.ahead) if effort else found.packs
    own = Packs(even.pack_offsets, narrow.ids[even.sample_ids])
    widths = np.concatenate([wide.widths, np.ones(len(own), np.int64)])
    return Seated(Packs.concatenate([wide.packs, own]), widths, found.seats)


@numba.njit(cache=True)
def _deal(order: Ints, sizes: Ints, budgets: Ints, seconds: Floats, done: Floats, first: Ints, ranks: Ints) -> Ints:
    """Return the pack of each sample, [N]; none if one found no room. Packs of rank r are first[r] to first[r + 1]."""
    owners = np.empty(len(order), np.int64)
    loads = np.zeros((first[-1], len(budgets)), np.int64)
    least = [(done[rank], place, rank) for place, rank in enumerate(ranks) if first[rank + 1] > first[rank]]
    heapq.heapify(least)
    full = [(0.0, 0, 0) for _ in range(0)]
    for sample in order:
        found = -1
        while found < 0 and len(least) > 0 and len(full) < LOOKED:
            busy, place, rank = heapq.heappop(least)
            most, open_ = -1.0, False
            for pack in range(first[rank], first[rank + 1]):
                room, left = 2.0, 1.0
                for size in range(len(budgets)):
                    load = loads[pack, size] + sizes[sample, size]
                    room = min(room, -1.0 if load > budgets[size] else 1.0 - load / max(budgets[size], 1))
                    left = min(left, 1.0 - loads[pack, size] / max(budgets[size], 1))
                open_ = open_ or left > CLOSED
                if room >= 0 and room > most:
                    found, most = pack, room
            if found < 0 and open_:
                full.append((busy, place, rank))
            elif found >= 0:
                heapq.heappush(least, (busy + seconds[sample], place, rank))
        while len(full) > 0:
            heapq.heappush(least, full.pop())
        if found < 0:
            return np.empty(0, np.int64)
        owners[sample] = found
        loads[found] += sizes[sample]
    return owners
