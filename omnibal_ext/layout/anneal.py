"""Simulated annealing over lists and layouts, compiled: one change, its seconds (`state`), accepted or not.

Of what fits, accept what is faster, and what is slower by d with probability exp(-d / temperature), which falls. A
change of lists moves an action, exchanges neighbours in an order, moves cuts, or recomputes more or fewer layers; one
of E and V moves one and what would be out of order, or those of some neighbouring microbatches on all ranks at once
(what ranks do at once holds the pipeline up once), has other ranks encode a microbatch, or exchanges the ranks of two.
"""

import numpy as np
from numba import njit

from omnibal_ext.arrays import Ints
from omnibal_ext.layout.state import CHUNK, MICROBATCH, Costs, State, board_of, stages_of, step_seconds
from omnibal_ext.packing.random_bits import below
from omnibal_ext.schedules.weaving import NONE

LISTS, LAYOUTS, ENCODERS = range(3)
"""What changes: lists; lists, cuts and recomputed layers; positions of E and V, and which ranks encode."""
DRAWS = (16, 16, 8)
"""Random numbers reserved for a change of each of these."""
ORDERS, CUTS, RECOMPUTED = 50, 100, 100
"""Changes in a thousand that exchange two in an order, move cuts, recompute more or fewer layers. On 26 searches of
large models plans were .8% slower with half of all three and .3% faster with twice; with a quarter or four times of one
alone, or no exchanges, at most .5% slower."""
DEALS, EXCHANGES, TOGETHER = 100, 100, 250
"""Changes in a thousand that assign a microbatch to other ranks, exchange two, or move neighbours on all ranks. In 10
searches for a tower's E and V the mean step time grew by .2% with half of all three, .1% with twice, 1.5% without the
first, .3% without the second or without the third."""
FURTHEST, FURTHEST_PART = 6, 7
"""Exponents: an action, or an E or V, moves by less than 2 to the power of this, near places more often."""


@njit(cache=True)
def changed(state: State, what: int, costs: Costs, seed: int, at: int) -> State:  # pragma: no cover - compiled
    """Return a copy of the state with one random change, which may deadlock or not fit. `what` may change: `LISTS`,
    `LAYOUTS` (lists, cuts or recomputed layers), `ENCODERS` (E and V). `at`: position of its first random number."""
    if what == ENCODERS:
        insertions = state.insertions.copy()
        _change_parts(state.insertions, insertions, state.kinds.shape[1], costs.ahead, seed, at)
        return State(state.kinds, state.orders, state.edges, state.recomputed, insertions)
    new = State(state.kinds.copy(), state.orders.copy(), state.edges.copy(), state.recomputed.copy(), state.insertions)
    dice = below(1000 if what == LAYOUTS else 1000 - CUTS - RECOMPUTED, seed, at)
    if dice < ORDERS:
        _exchange(new.orders, seed, at + 1)
    elif dice < 1000 - CUTS - RECOMPUTED:
        _move_action(new.kinds[below(new.kinds.shape[0], seed, at + 1)], seed, at + 2)
    else:
        if dice < 1000 - RECOMPUTED:
            _move_cuts(new.edges, seed, at + 1)
        if dice >= 1000 - RECOMPUTED or below(2, seed, at + 5) == 0:
            for draw in range(at + 6, at + 6 + 3 * (1 + below(2, seed, at + 12)), 3):
                stage, option = below(new.recomputed.shape[0], seed, draw), below(costs.offered.size, seed, draw + 1)
                new.recomputed[stage, costs.offered[option]] += 2 * below(2, seed, draw + 2) - 1
        _limit(new, costs)
    return new


@njit(cache=True)
def same_layers(state: State, other: State) -> bool:  # pragma: no cover - compiled
    """Return whether two states have the same cuts and recompute counts."""
    return bool((state.edges == other.edges).all() and (state.recomputed == other.recomputed).all())


@njit(cache=True)
def _limit(state: State, costs: Costs) -> None:  # pragma: no cover - compiled
    """Clip recompute counts, in place, to the layers that each stage holds; layers recomputed whole come first."""
    holds, of_option = costs.holds, costs.of_option
    stages, options = state.recomputed.shape
    for stage in range(stages):
        for option in range(options - 1, -1, -1):
            left = holds[option, state.edges[stage + 1]] - holds[option, state.edges[stage]]
            for other in range(option + 1, options):
                if of_option[other] == of_option[option]:
                    left -= state.recomputed[stage, other]
            state.recomputed[stage, option] = max(0, min(state.recomputed[stage, option], left))


@njit(cache=True)
def _exchange(orders: Ints, seed: int, at: int) -> None:  # pragma: no cover - compiled
    """Exchange random neighbours in one rank's order of forwards or backwards, in place; half of the time in all
    ranks'.

    Forwards of one chunk keep the order in which their packs come.
    """
    of, ranks, items = below(2, seed, at), orders.shape[0], orders.shape[3]
    if items == 1:
        return
    i, dice = below(items - 1, seed, at + 1), below(2 * ranks, seed, at + 2)
    mine = orders[dice % ranks, of]
    m, c, next_m, next_c = mine[MICROBATCH, i], mine[CHUNK, i], mine[MICROBATCH, i + 1], mine[CHUNK, i + 1]
    if of == 0 and c == next_c:
        return
    for rank in range(ranks):
        if dice < ranks and rank != dice:
            continue
        ms, cs = orders[rank, of, MICROBATCH], orders[rank, of, CHUNK]
        for k in range(items - 1):
            if ms[k] == m and cs[k] == c and ms[k + 1] == next_m and cs[k + 1] == next_c:
                ms[k], cs[k], ms[k + 1], cs[k + 1] = next_m, next_c, m, c
                break


@njit(cache=True)
def _move_action(kinds: Ints, seed: int, at: int) -> None:  # pragma: no cover - compiled
    """Move one action of a rank to another position in its list, in place."""
    source = below(kinds.size, seed, at)
    by = 1 + below(1 << below(FURTHEST, seed, at + 1), seed, at + 2)
    target = source + by if below(2, seed, at + 3) else source - by
    target = min(max(target, 0), kinds.size - 1)
    kind, toward = kinds[source], 1 if target > source else -1
    for i in range(source, target, toward):
        kinds[i] = kinds[i + toward]
    kinds[target] = kind


@njit(cache=True)
def _move_cuts(edges: Ints, seed: int, at: int) -> None:  # pragma: no cover - compiled
    """Move a cut, or neighbouring ones together, by one or two layers, in place, if that leaves no stage empty."""
    inner = edges.size - 2
    if inner < 1:
        return
    first = 1 + below(inner, seed, at)
    last = first if below(2, seed, at + 1) else first + below(inner - first + 1, seed, at + 2)
    by = (1 + below(2, seed, at + 3)) * (2 * below(2, seed, at + 4) - 1)
    if edges[first - 1] < edges[first] + by and edges[last] + by < edges[last + 1]:
        for cut in range(first, last + 1):
            edges[cut] += by


@njit(cache=True)
def _change_parts(
    insertions: Ints, new: Ints, length: int, ahead: bool, seed: int, at: int
) -> None:  # pragma: no cover - compiled
    """Draw a random change of `new`, a copy of `insertions`: who encodes a microbatch, or where E or V stand."""
    ranks, microbatches = insertions.shape[1], insertions.shape[2]
    dice, microbatch, rank = below(1000, seed, at), below(microbatches, seed, at + 1), below(ranks, seed, at + 2)
    if dice < DEALS:
        whole, other = below(4, seed, at + 3) == 0, below(ranks, seed, at + 4)
        for r in range(ranks):
            has = r == rank or (whole and other in (r, rank))
            _deal(new, r, microbatch, has, length, below(1 << 20, seed, at + 5), ahead)
        return
    if dice < DEALS + EXCHANGES:
        other = min(microbatches - 1, microbatch + 1 + below(4, seed, at + 3))
        for r in range(ranks):
            mine, theirs = insertions[0, r, microbatch] != NONE, insertions[0, r, other] != NONE
            if mine != theirs:
                _deal(new, r, microbatch, theirs, length, below(1 << 20, seed, at + 5), ahead)
                _deal(new, r, other, mine, length, below(1 << 20, seed, at + 6), ahead)
        return
    of = 0 if ahead else below(2, seed, at + 3)
    by = (1 + below(1 << below(FURTHEST_PART, seed, at + 4), seed, at + 5)) * (2 * below(2, seed, at + 6) - 1)
    together = dice < DEALS + EXCHANGES + TOGETHER
    while not together and insertions[0, rank, microbatch] == NONE:
        rank = (rank + 1) % ranks
    for m in range(microbatch, min(microbatches, microbatch + (ranks if together else 1))):
        for r in range(ranks):
            if (together or r == rank) and insertions[of, r, m] != NONE:
                _put(new, of, r, m, min(max(insertions[of, r, m] + by, 0), length))


@njit(cache=True)
def _deal(
    insertions: Ints, rank: int, microbatch: int, has: bool, length: int, dice: int, ahead: bool
) -> None:  # pragma: no cover - compiled
    """Make a rank encode a microbatch, with E and V at a random position between its neighbours' (no V if `ahead`), or,
    unless `has`, take both away; in place."""
    if has == (insertions[0, rank, microbatch] != NONE):
        return
    for of in range(1 if ahead else 2):
        if not has:
            insertions[of, rank, microbatch] = NONE
            continue
        low, high = 0, length
        for m in range(microbatch - 1, -1, -1):
            if insertions[of, rank, m] != NONE:
                low = insertions[of, rank, m]
                break
        for m in range(microbatch + 1, insertions.shape[2]):
            if insertions[of, rank, m] != NONE:
                high = insertions[of, rank, m]
                break
        insertions[of, rank, microbatch] = low + dice % (high - low + 1)


@njit(cache=True)
def _put(insertions: Ints, of: int, rank: int, microbatch: int, point: int) -> None:  # pragma: no cover - compiled
    """Move one E (`of` 0) or V (1) to `point`, in place, and with it those that would be out of order."""
    for m in range(insertions.shape[2]):
        here = insertions[of, rank, m]
        if here == NONE:
            continue
        if m == microbatch:
            insertions[of, rank, m] = point
        else:
            insertions[of, rank, m] = min(here, point) if m < microbatch else max(here, point)


@njit(cache=True)
def anneal(
    state: State, costs: Costs, what: int, changes: int, warm: float, cold: float, seed: int
) -> tuple[State, float]:  # pragma: no cover - compiled
    """Search from `state`; return the fastest state met, its W filled in, and its step seconds: never slower than
    `state` if that fits, inf if none fitted.

    `what` may change: `LISTS`, `LAYOUTS` or `ENCODERS`. The temperature falls from `warm` to `cold`, in seconds.
    """
    board, stages = board_of(state, costs), stages_of(state, costs)
    here = step_seconds(state, stages, costs, board, -1)
    best, best_stages, least = state, stages, here
    for change in range(changes):
        at = change * DRAWS[what]
        other = changed(state, what, costs, seed, at)
        others = stages_of(other, costs) if what == LAYOUTS and not same_layers(state, other) else stages
        there = step_seconds(other, others, costs, board, change)
        temperature = warm * (cold / warm) ** (change / changes)
        chance = (1 + below(1 << 30, seed, at + DRAWS[what] - 1)) / (1 << 30)
        if there < np.inf and there <= here - temperature * np.log(chance):
            state, stages, here = other, others, there
            if here < least:
                best, best_stages, least = state, stages, here
    step_seconds(best, best_stages, costs, board, changes)
    return State(board.kinds, best.orders, best.edges, best.recomputed, best.insertions), least


@njit(cache=True)
def judged(state: State, costs: Costs) -> float:  # pragma: no cover - compiled
    """Return the step seconds of a state; inf if it deadlocks or does not fit."""
    return step_seconds(state, stages_of(state, costs), costs, board_of(state, costs), 0)
