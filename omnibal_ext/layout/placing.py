"""Where E and V stand in the lists of the language model's stages, and who encodes what: simulated annealing, compiled.

A state says of every rank and microbatch behind how many of the rank's language actions its E and V stand, or that it
has no part of it. The language model's order stays. One change moves an E or V, and those that would stand out of order
with it; or those of some neighbouring microbatches on all ranks at once, for what ranks do at the same time holds up
the pipeline once; or gives a microbatch's parts to other ranks, or exchanges those of two. What deadlocks, or keeps
more bytes than there are, is left out.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.random_bits import below
from omnibal_ext.schedules.beside import BACKWARD, FORWARD, WEIGHT

NONE = -1
"""The place of a part that a rank does not have."""
DRAWS = 8
"""Random numbers a change may take."""
FURTHEST = 7
"""An action moves by less than 2 to the power of this, near places more often."""
DEALS, EXCHANGES, TOGETHER = 100, 100, 250
"""Of a thousand changes: how many deal a microbatch to other ranks, exchange two, or move neighbours on all ranks."""


class Costs(NamedTuple):
    """What places are judged by."""

    actions: Ints
    """[ranks, length, 3] Of the language model: kind, stage, microbatch."""
    seconds: Floats
    """[3, stages, microbatches, cases]"""
    links: Floats
    """[stages - 1, microbatches, cases]"""
    parts: Floats
    """[ranks, 2, microbatches, cases] Of E and V where so many ranks (less one) share a microbatch."""
    hops: Floats
    """[ranks, microbatches, cases] Likewise."""
    kept: Floats
    """[ranks, microbatches] Bytes from E to V likewise."""
    room: Floats
    """[ranks] Bytes for what is kept."""
    step: Floats
    """[ranks] Seconds once an iteration."""
    ranks_of: Ints
    """[stages]"""
    ahead: bool
    replicas: int
    """Data-parallel ranks: so many neighbouring cases are one iteration, which ends with the last of them."""


@njit(cache=True)
def anneal_places(
    places: Ints, costs: Costs, changes: int, warm: float, cold: float, seed: int
) -> tuple[Ints, float]:  # pragma: no cover - compiled
    """The fastest places int64 [2, ranks, microbatches] met, and their step seconds, from those given."""
    here = judge_places(places, costs)
    best, least = places, here
    for change in range(changes):
        at = change * DRAWS
        other = _changed(places, costs, seed, at)
        there = judge_places(other, costs)
        temperature = warm * (cold / warm) ** (change / changes)
        chance = (1 + below(1 << 30, seed, at + DRAWS - 1)) / (1 << 30)
        if there < np.inf and there <= here - temperature * np.log(chance):
            places, here = other, there
            if here < least:
                best, least = places, here
    return best, least


@njit(cache=True)
def _changed(places: Ints, costs: Costs, seed: int, at: int) -> Ints:  # pragma: no cover - compiled
    changed = places.copy()
    ranks, microbatches, length = places.shape[1], places.shape[2], costs.actions.shape[1]
    dice, microbatch = below(1000, seed, at), below(microbatches, seed, at + 1)
    rank = below(ranks, seed, at + 2)
    if dice < DEALS:
        whole = below(4, seed, at + 3) == 0
        other = below(ranks, seed, at + 4)
        for r in range(ranks):
            has = r == rank or (whole and other in (r, rank))
            _deal(changed, r, microbatch, has, length, below(1 << 20, seed, at + 5), costs.ahead)
        return changed
    if dice < DEALS + EXCHANGES:
        other = min(microbatches - 1, microbatch + 1 + below(4, seed, at + 3))
        for r in range(ranks):
            mine, theirs = places[0, r, microbatch] != NONE, places[0, r, other] != NONE
            if mine != theirs:
                _deal(changed, r, microbatch, theirs, length, below(1 << 20, seed, at + 5), costs.ahead)
                _deal(changed, r, other, mine, length, below(1 << 20, seed, at + 6), costs.ahead)
        return changed
    of = 0 if costs.ahead else below(2, seed, at + 3)
    by = 1 + below(1 << below(FURTHEST, seed, at + 4), seed, at + 5)
    by = by if below(2, seed, at + 6) else -by
    if dice < DEALS + EXCHANGES + TOGETHER:
        end = min(microbatches, microbatch + ranks)
        for m in range(microbatch, end):
            for r in range(ranks):
                if places[of, r, m] != NONE:
                    _put(changed, of, r, m, min(max(places[of, r, m] + by, 0), length))
        return changed
    while places[0, rank, microbatch] == NONE:
        rank = (rank + 1) % ranks
    _put(changed, of, rank, microbatch, min(max(places[of, rank, microbatch] + by, 0), length))
    return changed


@njit(cache=True)
def _deal(
    places: Ints, rank: int, microbatch: int, has: bool, length: int, dice: int, ahead: bool
) -> None:  # pragma: no cover - compiled
    """Give a rank a part, at a place between its neighbours', or take it away."""
    if has == (places[0, rank, microbatch] != NONE):
        return
    for of in range(1 if ahead else 2):
        if not has:
            places[of, rank, microbatch] = NONE
            continue
        low, high = 0, length
        for m in range(microbatch - 1, -1, -1):
            if places[of, rank, m] != NONE:
                low = places[of, rank, m]
                break
        for m in range(microbatch + 1, places.shape[2]):
            if places[of, rank, m] != NONE:
                high = places[of, rank, m]
                break
        places[of, rank, microbatch] = low + dice % (high - low + 1)


@njit(cache=True)
def _put(places: Ints, of: int, rank: int, microbatch: int, place: int) -> None:  # pragma: no cover - compiled
    """Move one, and those before or behind it along where they would stand out of order."""
    for m in range(places.shape[2]):
        here = places[of, rank, m]
        if here == NONE:
            continue
        if m == microbatch:
            places[of, rank, m] = place
        else:
            places[of, rank, m] = min(here, place) if m < microbatch else max(here, place)


@njit(cache=True)
def judge_places(places: Ints, costs: Costs) -> float:  # noqa: PLR0912, PLR0915  # pragma: no cover - compiled
    """Mean over iterations of the slowest data-parallel rank; infinite where lists deadlock or a rank lacks bytes."""
    ranks, microbatches, cases = places.shape[1], places.shape[2], costs.seconds.shape[3]
    length, stages, first = costs.actions.shape[1], costs.ranks_of.size, costs.ranks_of[0]
    count = np.zeros(microbatches, dtype=np.int64)
    for m in range(microbatches):
        for rank in range(ranks):
            count[m] += places[0, rank, m] != NONE
    at, nexts = np.zeros(ranks, dtype=np.int64), np.zeros((2, ranks), dtype=np.int64)
    held, clock = np.zeros(ranks), np.zeros((ranks, cases))
    done = np.zeros((3, stages, microbatches), dtype=np.bool_)
    ends = np.empty((2, stages, microbatches, cases))
    encoded, features = np.zeros(microbatches, dtype=np.int64), np.zeros((microbatches, cases))
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while True:
                for of in range(2):
                    while nexts[of, rank] < microbatches and places[of, rank, nexts[of, rank]] == NONE:
                        nexts[of, rank] += 1
                e, v = nexts[0, rank], nexts[1, rank]
                e_place = places[0, rank, e] if e < microbatches else length + 1
                v_place = places[1, rank, v] if v < microbatches else length + 1
                if e_place <= at[rank] and e_place <= v_place:
                    held[rank] += costs.kept[count[e] - 1, e]
                    if held[rank] > costs.room[rank]:
                        return np.inf
                    for case in range(cases):
                        clock[rank, case] += costs.parts[count[e] - 1, 0, e, case]
                        hop = costs.hops[count[e] - 1, e, case] if rank != first else 0.0
                        features[e, case] = max(features[e, case], clock[rank, case] + hop)
                    encoded[e] += 1
                    nexts[0, rank] += 1
                elif v_place <= at[rank]:
                    if not done[BACKWARD, 0, v]:
                        break
                    if e <= v:
                        return np.inf
                    for case in range(cases):
                        hop = costs.hops[count[v] - 1, v, case] if rank != first else 0.0
                        begin = max(clock[rank, case], ends[BACKWARD, 0, v, case] + hop)
                        clock[rank, case] = begin + costs.parts[count[v] - 1, 1, v, case]
                    held[rank] -= costs.kept[count[v] - 1, v]
                    nexts[1, rank] += 1
                elif at[rank] < length:
                    kind, stage, m = (
                        costs.actions[rank, at[rank], 0],
                        costs.actions[rank, at[rank], 1],
                        costs.actions[rank, at[rank], 2],
                    )
                    source = stage - 1 if kind == FORWARD else stage + 1
                    takes = kind != WEIGHT and 0 <= source < stages
                    if takes and not done[kind, source, m]:
                        break
                    if kind != FORWARD and not done[kind - 1, stage, m]:
                        break
                    waits = kind == FORWARD and stage == 0 and not costs.ahead
                    if waits and encoded[m] < count[m]:
                        break
                    takes = takes and costs.ranks_of[source] != rank
                    link = stage - 1 if kind == FORWARD else stage
                    for case in range(cases):
                        begin = clock[rank, case]
                        if takes:
                            begin = max(begin, ends[kind, source, m, case] + costs.links[link, m, case])
                        elif waits:
                            begin = max(begin, features[m, case])
                        clock[rank, case] = begin + costs.seconds[kind, stage, m, case]
                        if kind != WEIGHT:
                            ends[kind, stage, m, case] = clock[rank, case]
                    done[kind, stage, m] = True
                    at[rank] += 1
                else:
                    break
                moved = True
    total = 0.0
    for rank in range(ranks):
        if at[rank] < length or nexts[0, rank] < microbatches or nexts[1, rank] < microbatches:
            return np.inf
    for begin_case in range(0, cases, costs.replicas):
        slowest = 0.0
        for case in range(begin_case, begin_case + costs.replicas):
            for rank in range(ranks):
                slowest = max(slowest, clock[rank, case] + costs.step[rank])
        total += slowest
    return total / (cases // costs.replicas)
