"""Iterations of packs of mixed widths: wide packs spread over all iterations, and narrow samples fill up the ranks.

    4 ranks, 5 slots each            seconds
    rank 0   A  A' c  -  -           3.3 + 1 + .7
    rank 1   A  A' c' -  -           3.3 + 1 + .7
    rank 2   d  e  f  g  h           1 + 1 + 1 + 1 + 1
    rank 3   i  j  k  l  m           1 + 1 + 1 + 1 + 1

A rank busy with wide packs gets fewer narrow samples. Wide packs are assigned first, then each sample to the least
loaded rank; last, narrow packs exchange samples to equalize ranks (`equalize_packs.py`).
"""

import heapq
from typing import NamedTuple

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.equalize_packs import equalize_packs
from omnibal_ext.packing.ordering.slots import IterationSlots, SlottedPacks, fill_iterations
from omnibal_ext.packing.packs import EMPTY_PACK, PackList, offsets_of

FILL = 0.985  # first target, as a fraction of a full narrow pack
SHRINK = 0.985  # factor on the target if samples did not fit
TRIES = 16  # targets tried
CLOSED_BELOW = 0.015  # with less of a budget left a pack takes no more samples
MOST_FULL_RANKS = 64  # ranks tried for a sample before giving up


class WidePacks(NamedTuple):
    """Packs wider than a rank."""

    packs: PackList
    widths: Ints  # [P]
    seconds: Floats  # [P, parts] of the fullest shard


class NarrowSamples(NamedTuple):
    """Samples that fit one rank."""

    ids: Ints  # [N]
    sizes: Ints  # [N, K] sizes that have a budget
    budgets: Ints  # [K]
    seconds: Floats  # [N, parts]


def mixed_width_iterations(
    wide: WidePacks, narrow: NarrowSamples, data_parallel_size: int, micro_batches: int, seed: int, effort: float
) -> SlottedPacks | None:
    """Assign wide packs, and samples that fit one rank, to iterations; None if such a sample finds no room in `TRIES`
    tries.

    1. Use as few iterations as the work needs if narrow packs are full up to a target.
    2. Assign wide packs, widest first, then costliest, to the iteration with the least wide work and there to the least
       loaded team.
    3. An iteration's target length is its slowest rank's, or a common minimum if all work would not fit so.
    4. Assign samples, costliest first, to the rank of any iteration that is furthest below its target and has room. If
       one does not fit, repeat with a lower target per pack: more packs, more iterations.
    5. Exchange samples between narrow packs until ranks are equal, for `effort` nominal seconds.
    """
    fractions = (narrow.sizes / np.maximum(narrow.budgets, 1)).sum(axis=0)
    full = float(narrow.seconds.sum() / max(fractions.max(initial=0.0), 1e-9))
    work = float((wide.seconds.sum(axis=1) * wide.widths).sum() + narrow.seconds.sum())
    each = FILL * full
    for _ in range(TRIES):
        iterations = max(1, int(np.ceil(work / (data_parallel_size * micro_batches * each))))
        tables = fill_iterations(wide.seconds, wide.widths, iterations, data_parallel_size, micro_batches)
        if tables and (found := _fill(tables, narrow, work, each, seed)):
            return _schedule(found, wide, narrow, seed, effort)
        each *= SHRINK
    return None


def _lengths(fullest: Floats, work: float) -> Floats:
    """Return the seconds each iteration should take, [I]: its slowest rank's, or a common minimum; their sum is
    `work`."""
    low, high = 0.0, max(float(fullest.max()), work / len(fullest))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(fullest, middle).sum() < work else (low, middle)
    return np.maximum(fullest, high)


class _NarrowPacks(NamedTuple):
    """Packs of samples that fit one rank, and the slots of all packs."""

    packs: PackList  # sample numbers are positions in `NarrowSamples`
    ranks: Ints  # [P] iteration x D + rank that runs it
    other_seconds: Floats  # [I * D, parts], see `_other_seconds`
    slots: Ints  # [I, D, M] pack numbers: wide packs, then narrow ones


def _fill(
    tables: list[IterationSlots], narrow: NarrowSamples, work: float, each: float, seed: int
) -> _NarrowPacks | None:
    """Put samples that fit one rank into packs of about `each` seconds, in slots that wide packs leave free. `tables`:
    slots with the wide packs in; `work`: seconds of all packs. None if a sample does not fit."""
    slots = np.stack([table.slots for table in tables])
    of_parts = np.stack([table.seconds for table in tables])
    done = of_parts.sum(axis=2)
    missing = (_lengths(done.max(axis=1), work / slots.shape[1])[:, None] - done).ravel()
    free = slots.shape[2] - np.stack([table.taken for table in tables]).ravel()
    packs = np.minimum(free, np.ceil(missing.clip(0) / each).astype(np.int64))
    first = offsets_of(packs)
    random = np.random.default_rng(seed).permutation(len(narrow.ids))
    order = random[np.argsort(-narrow.seconds[random].sum(axis=1), kind="stable")]
    turns = np.random.default_rng((seed, 1)).permutation(len(packs))  # decides ties between ranks
    owners = _assign_samples(order, narrow.sizes, narrow.budgets, narrow.seconds.sum(axis=1), -missing, first, turns)
    if len(owners) == 0:
        return None
    counts = np.bincount(owners, minlength=first[-1])
    filled = np.flatnonzero(counts)
    number = np.full(first[-1], EMPTY_PACK)
    number[filled] = int(slots.max(initial=-1)) + 1 + np.arange(len(filled))
    rows = slots.reshape(-1, slots.shape[2])
    of_rank = np.repeat(np.arange(len(packs)), packs)
    rows[of_rank, (slots.shape[2] - free)[of_rank] + np.arange(first[-1]) - first[of_rank]] = number
    built = PackList(offsets_of(counts[filled]), np.argsort(owners, kind="stable"))
    return _NarrowPacks(built, of_rank[filled], _other_seconds(of_parts, narrow.seconds), rows.reshape(slots.shape))


def _other_seconds(done: Floats, narrow: Floats) -> Floats:
    """Return seconds of wide work per rank and part, aligned at the end of the iteration, [I * D, parts].

    An iteration shorter than the longest has the difference added, so that equal sums mean that ranks end together.

    Args:
        done: seconds of wide packs, [I, D, parts].
        narrow: of samples, [N, parts].
    """
    each = (done.sum(axis=(0, 1)) + narrow.sum(axis=0)) / done.shape[1]
    lengths = [_lengths(part, work) for part, work in zip(done.max(axis=1).T, each, strict=True)]
    missing = np.stack(lengths, axis=1)[:, None] - done
    other_seconds: Floats = (missing.max(axis=(0, 1)) - missing).reshape(-1, done.shape[2])
    return other_seconds


def _schedule(found: _NarrowPacks, wide: WidePacks, narrow: NarrowSamples, seed: int, effort: float) -> SlottedPacks:
    """Exchange samples between packs of one rank until ranks are equal; return all packs with their slots."""
    one_group = np.zeros(len(found.packs), np.int64)
    arguments = narrow.sizes, narrow.budgets, narrow.seconds, found.ranks, one_group, seed, effort
    equalized = equalize_packs(found.packs, *arguments, other_seconds=found.other_seconds) if effort else found.packs
    narrow_packs = PackList(equalized.pack_offsets, narrow.ids[equalized.sample_ids])
    widths = np.concatenate([wide.widths, np.ones(len(narrow_packs), np.int64)])
    return SlottedPacks(PackList.concatenate([wide.packs, narrow_packs]), widths, found.slots)


@numba.njit(cache=True)
def _assign_samples(
    order: Ints, sizes: Ints, budgets: Ints, seconds: Floats, done: Floats, first: Ints, ranks: Ints
) -> Ints:
    """Return the pack of each sample, [N], in the rank that is furthest below its target (-`done` seconds); empty if
    one does not fit. Rank r has packs first[r]:first[r + 1]."""
    owners = np.empty(len(order), np.int64)
    loads = np.zeros((first[-1], len(budgets)), np.int64)
    least = [(done[rank], tie, rank) for tie, rank in enumerate(ranks) if first[rank + 1] > first[rank]]
    heapq.heapify(least)
    full = [(0.0, 0, 0) for _ in range(0)]
    for sample in order:
        found = -1
        while found < 0 and len(least) > 0 and len(full) < MOST_FULL_RANKS:
            busy, tie, rank = heapq.heappop(least)
            most, has_room = -1.0, False
            for pack in range(first[rank], first[rank + 1]):
                room, left = 2.0, 1.0
                for size in range(len(budgets)):
                    load = loads[pack, size] + sizes[sample, size]
                    room = min(room, -1.0 if load > budgets[size] else 1.0 - load / max(budgets[size], 1))
                    left = min(left, 1.0 - loads[pack, size] / max(budgets[size], 1))
                has_room = has_room or left > CLOSED_BELOW
                if room >= 0 and room > most:
                    found, most = pack, room
            if found < 0 and has_room:
                full.append((busy, tie, rank))
            elif found >= 0:
                heapq.heappush(least, (busy + seconds[sample], tie, rank))
        while len(full) > 0:
            heapq.heappush(least, full.pop())
        if found < 0:
            return np.empty(0, np.int64)
        owners[sample] = found
        loads[found] += sizes[sample]
    return owners
