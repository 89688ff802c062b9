"""Compiled loops that give any lists of actions start and end times and bytes held.

    start(action)  = max(end of the action before it on its rank, arrival of what it waits for)
    end(action)    = max(start + the device's seconds, launched)
    launched       = the host's seconds for all actions of its rank up to this one: in order, never waiting
    arrival        = end on the other rank + transfer; transfers overlap with work and do not queue

Nothing here knows what an action is for: E and V of a replicated tower are rows like F, B and W (`schedules.program`).
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numba.extending import register_jitable

from omnibal_ext.arrays import Floats, Ints

SIDE_BY_SIDE = 32
"""Cases computed together by `last_ends`; with fewer it is slower, with more not faster."""


class Rows(NamedTuple):
    """Actions of all ranks in one order, each behind all that it waits for."""

    steps: Ints
    """[4, actions] Rank, stage (for E and V the rank), kind (an index of `KINDS`), microbatch."""
    first: Ints
    """[actions + 1] Action a's waits are waits[:, first[a] : first[a + 1]]."""
    waits: Ints
    """[2, waits] Row of the other rank's action that is waited for; row of `Seconds.transfers` for its tensor."""
    ranks: int


class Seconds(NamedTuple):
    """Seconds of actions, transfers and launches."""

    work: Floats
    """[kinds, stages, cases, microbatches] Actions."""
    transfers: Floats
    """[stages, cases, microbatches] Transfers from each stage to the next, or back; in the last row, which no stage
    needs, from encoding ranks to the first stage, or back."""
    host: Floats
    """[kinds, stages] Launches of an action's kernels by the host."""


@njit(cache=True)
def in_order(lengths: Ints, first: Ints, needed: Ints) -> Ints:  # pragma: no cover - compiled
    """Return action numbers in an order in which each follows all it waits for; fewer than all if the lists deadlock.

    Actions are numbered rank after rank, `lengths` each; action a waits for needed[first[a] : first[a + 1]].
    """
    end = np.cumsum(lengths)
    at, done = end - lengths, np.zeros(first.size - 1, dtype=np.bool_)
    order, count, moved = np.empty(done.size, dtype=np.int64), 0, True
    while moved:
        moved = False
        for rank in range(lengths.size):
            while at[rank] < end[rank]:
                action, ready = at[rank], True
                for wait in range(first[action], first[action + 1]):
                    ready = ready and done[needed[wait]]
                if not ready:
                    break
                done[action], order[count], moved = True, action, True
                count += 1
                at[rank] += 1
    return order[:count]


@njit(cache=True)
def play(rows: Rows, seconds: Seconds, case: int) -> tuple[Floats, Floats, Floats]:  # pragma: no cover - compiled
    """Compute when actions run in one case, float64 seconds: starts [actions], ends [actions], last ends [ranks]."""
    steps, waits, work, transfers = rows.steps, rows.waits, seconds.work, seconds.transfers
    start, end = np.empty(steps.shape[1]), np.empty(steps.shape[1])
    clock, launched = np.zeros(rows.ranks), np.zeros(rows.ranks)
    for i in range(steps.shape[1]):
        rank, stage, kind, microbatch = steps[0, i], steps[1, i], steps[2, i], steps[3, i]
        launched[rank] += seconds.host[kind, stage]
        begin = clock[rank]
        for wait in range(rows.first[i], rows.first[i + 1]):
            begin = max(begin, end[waits[0, wait]] + transfers[waits[1, wait], case, microbatch])
        start[i] = begin
        end[i] = max(begin + work[kind, stage, case, microbatch], launched[rank])
        clock[rank] = end[i]
    return start, end, clock


@njit(cache=True)
def last_ends(rows: Rows, seconds: Seconds) -> Floats:  # pragma: no cover - compiled
    """Return every rank's last end in all cases, float64 [cases, ranks]: as `play` does, `SIDE_BY_SIDE` at once."""
    steps, waits, cases = rows.steps, rows.waits, seconds.work.shape[2]
    ends = np.empty((cases, rows.ranks))
    if cases == 1:
        ends[0] = play(rows, seconds, 0)[2]
        return ends
    end = np.empty((steps.shape[1], SIDE_BY_SIDE))
    for first in range(0, cases, SIDE_BY_SIDE):
        count = min(SIDE_BY_SIDE, cases - first)
        clock, launched = np.zeros((rows.ranks, SIDE_BY_SIDE)), np.zeros(rows.ranks)
        for i in range(steps.shape[1]):
            rank, stage, kind, microbatch = steps[0, i], steps[1, i], steps[2, i], steps[3, i]
            launched[rank] += seconds.host[kind, stage]
            now, takes = clock[rank], seconds.work[kind, stage]
            for wait in range(rows.first[i], rows.first[i + 1]):
                before, transfer = end[waits[0, wait]], seconds.transfers[waits[1, wait]]
                for case in range(count):
                    now[case] = max(now[case], before[case] + transfer[first + case, microbatch])
            for case in range(count):
                now[case] = max(now[case] + takes[first + case, microbatch], launched[rank])
                end[i, case] = now[case]
        ends[first : first + count] = clock[:, :count].T
    return ends


@register_jitable
def moved_bytes(kept: Any, late: Any) -> tuple[Any, Any, Any]:
    """Return by how many bytes F, B and W of a microbatch change what their rank holds; negative: freed.

    `kept` are held from F to the end of B, `late` from the end of B to that of W. All that counts bytes in flight uses
    these. Four places add them up, as they differ in what they know: `hold` has start times, `LayoutProblem.moments`
    only the order; the annealer and the greedy player make the list while they count.
    """
    return kept, late - kept, -late


class Moves(NamedTuple):
    """Bytes that actions take and free."""

    order: Ints
    """[actions] Rows by start time."""
    on_top: Floats
    """[actions] Bytes while an action runs, above what its rank held before; -inf: none besides what it takes."""
    first: Ints
    """[actions + 1] Row r's moves are first[r] to first[r + 1] - 1."""
    rank: Ints
    """[moves] Rank on which bytes are taken."""
    taken: Floats
    """[moves] Bytes taken; negative: freed."""


@njit(cache=True)
def hold(steps: Ints, moves: Moves, held: Floats) -> tuple[Floats, Floats]:  # pragma: no cover - compiled
    """Sum the bytes on every rank over time, beginning with `held` [ranks]; return their peaks [ranks], and the bytes
    on an action's rank after each action [actions]."""
    held, peak, after = held.copy(), np.zeros(held.size), np.empty(steps.shape[1])
    for i in moves.order:
        rank = steps[0, i]
        peak[rank] = max(peak[rank], held[rank] + moves.on_top[i])
        for move in range(moves.first[i], moves.first[i + 1]):
            where = moves.rank[move]
            held[where] += moves.taken[move]
            peak[where] = max(peak[where], held[where])
        after[i] = held[rank]
    return peak, after
