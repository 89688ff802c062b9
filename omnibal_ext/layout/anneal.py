"""Simulated annealing over schedule lists and layouts: the compiled part of `lists`.

A state is played in one pass: each rank goes on until it waits for a neighbour who is not so far, round and round.
Numbers are assigned one by one: assigning slices takes numba longer to compile than all else.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.layout.tables import KIND_OF_WAY
from omnibal_ext.packing.random_bits import below
from omnibal_ext.schedules.actions import BACKWARD, FORWARD, WEIGHT

MICROBATCH, CHUNK = 0, 1
ORDERS, CUTS, RECOMPUTED = 50, 100, 100
"""Of a thousand changes: how many exchange two in an order, move cuts, recompute more or fewer layers."""
FURTHEST = 6
"""An action moves by less than 2 to the power of this, near places more often."""
DRAWS = 16
"""Random numbers a change may take."""


class State(NamedTuple):
    """Lists of all ranks, and the layers of all stages."""

    kinds: Ints
    """[ranks, actions] 0 F, 1 B, 2 W: the n-th of a kind is the n-th of its order. Without W, they are filled in."""
    orders: Ints
    """[ranks, 2, 2, items] Of forwards, and of backwards, which W follow: microbatch and chunk."""
    edges: Ints
    """[stages + 1] Stage s holds layers edges[s] .. edges[s + 1] - 1."""
    again: Ints
    """[stages, ways] Layers that are recomputed, see `tables.WAYS`."""


class Places(NamedTuple):
    """Where stages sit."""

    ranks_of: Ints
    """[stages]"""
    stages_of: Ints
    """[ranks, chunks]"""


class Costs(NamedTuple):
    """What a state is judged by. Prefix sums over the chain have [..., layers + 1, ...]."""

    seconds: Floats
    """[3, layers + 1, microbatches, cases] Prefix sums of F, B and W."""
    again: Floats
    """[ways, microbatches, cases] What recomputing a layer takes."""
    links: Floats
    """[layers, microbatches, cases] Carrying a layer's output."""
    step: Floats
    """[layers + 1] Prefix sums of seconds once an iteration."""
    holds: Ints
    """[ways, layers + 1] Prefix sums: layers of the way's kind."""
    bytes: Floats
    """[3, layers + 1] Prefix sums: fixed, kept from F to B, and from B to W."""
    received: Floats
    """[layers + 1] Bytes kept of features that a stage receives which begins with each layer."""
    saved: Floats
    """[2, ways] (kept, late) bytes that recomputing a layer saves."""
    offered: Ints
    """The ways to choose from."""
    room: float
    """Bytes of a rank for its layers."""
    action_seconds: float
    iteration_seconds: float
    places: Places
    replicas: int
    """Data-parallel ranks: so many neighbouring cases are one iteration, which ends with the last of them."""


class Board(NamedTuple):
    """Where a play is written down."""

    done: Ints
    """[3, stages, microbatches] Number of the last play in which F, B or W was done."""
    ends: Floats
    """[2, stages, microbatches, cases] When F and B ended in it."""
    kinds: Ints
    """[ranks, actions] What was done, in its order."""


@njit(cache=True)
def anneal(
    state: State, costs: Costs, changes: int, warm: float, cold: float, movable: bool, seed: int
) -> tuple[State, float]:  # pragma: no cover - compiled
    """The fastest state met, W filled in, and its step seconds; temperatures `warm` to `cold` in seconds.

    Cuts and recomputed layers change only where `movable`. Never slower than `state`, if that fits.
    """
    ranks, stages = state.kinds.shape[0], state.edges.size - 1
    microbatches, cases = costs.again.shape[1], costs.again.shape[2]
    actions = 3 * state.orders.shape[3]
    done, ends = np.full((3, stages, microbatches), -2), np.empty((2, stages, microbatches, cases))
    board = Board(done, ends, np.empty((ranks, actions), dtype=np.int64))
    here = _step_seconds(state, costs, board, -1)
    best, least = state, here
    for change in range(changes):
        at = change * DRAWS
        other = _changed(state, costs, movable, seed, at)
        there = _step_seconds(other, costs, board, change)
        temperature = warm * (cold / warm) ** (change / changes)
        chance = (1 + below(1 << 30, seed, at + DRAWS - 1)) / (1 << 30)
        if there < np.inf and there <= here - temperature * np.log(chance):
            state, here = other, there
            if here < least:
                best, least = state, here
    _step_seconds(best, costs, board, changes)
    return State(board.kinds, best.orders, best.edges, best.again), least


@njit(cache=True)
def _changed(state: State, costs: Costs, movable: bool, seed: int, at: int) -> State:  # pragma: no cover - compiled
    """The state with one thing changed."""
    changed = State(state.kinds.copy(), state.orders.copy(), state.edges.copy(), state.again.copy())
    dice = below(1000 if movable else 1000 - CUTS - RECOMPUTED, seed, at)
    if dice < ORDERS:
        _exchange(changed.orders, seed, at + 1)
    elif dice < 1000 - CUTS - RECOMPUTED:
        _move_action(changed.kinds[below(changed.kinds.shape[0], seed, at + 1)], seed, at + 2)
    else:
        if dice < 1000 - RECOMPUTED:
            _move_cuts(changed.edges, seed, at + 1)
        if dice >= 1000 - RECOMPUTED or below(2, seed, at + 5) == 0:
            for draw in range(at + 6, at + 6 + 3 * (1 + below(2, seed, at + 12)), 3):
                stage, way = below(changed.again.shape[0], seed, draw), below(costs.offered.size, seed, draw + 1)
                changed.again[stage, costs.offered[way]] += 2 * below(2, seed, draw + 2) - 1
        _limit(changed, costs.holds)
    return changed


@njit(cache=True)
def _limit(state: State, holds: Ints) -> None:  # pragma: no cover - compiled
    """Recompute no more layers than there are: first count those recomputed whole, which stand behind."""
    stages, ways = state.again.shape
    for stage in range(stages):
        for way in range(ways - 1, -1, -1):
            left = holds[way, state.edges[stage + 1]] - holds[way, state.edges[stage]]
            for other in range(way + 1, ways):
                if KIND_OF_WAY[other] == KIND_OF_WAY[way]:
                    left -= state.again[stage, other]
            state.again[stage, way] = max(0, min(state.again[stage, way], left))


@njit(cache=True)
def _exchange(orders: Ints, seed: int, at: int) -> None:  # pragma: no cover - compiled
    """Exchange two neighbours in the order of one rank, half of the time on all ranks where they are neighbours too.

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
    """Put one action of a rank elsewhere in its list."""
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
    """Move a cut, or neighbouring ones together, by one or two layers, if that leaves no stage empty."""
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
def _step_seconds(  # noqa: PLR0912, PLR0915 (calls in the loop would take longer than all else)
    state: State, costs: Costs, board: Board, number: int
) -> float:  # pragma: no cover - compiled
    """Mean over iterations of the slowest data-parallel rank; infinite where lists deadlock or a rank lacks bytes.

    In lists without W a rank does its oldest W while it would wait otherwise, in the first case, and where it lacks
    the bytes for its next action.
    """
    ranks, length = state.kinds.shape
    stages, cases, items = state.edges.size - 1, costs.again.shape[2], state.orders.shape[3]
    ranks_of, stages_of = costs.places
    kept, late, transient, room = _bytes(state, costs)
    seen, held, clock = np.zeros((ranks, 3), dtype=np.int64), np.zeros(ranks), np.zeros((ranks, cases))
    filling, left, moved = length < board.kinds.shape[1], board.kinds.size, True
    while moved:
        moved = False
        for rank in range(ranks):
            while True:
                at = seen[rank, FORWARD] + seen[rank, BACKWARD] + (0 if filling else seen[rank, WEIGHT])
                if at == length and (not filling or seen[rank, WEIGHT] == items):
                    break
                kind = state.kinds[rank, at] if at < length else WEIGHT
                item, of = seen[rank, kind], min(kind, 1)
                m, stage = (
                    state.orders[rank, of, MICROBATCH, item],
                    stages_of[rank, state.orders[rank, of, CHUNK, item]],
                )
                source = stage - 1 if kind == FORWARD else stage + 1
                takes = kind != WEIGHT and 0 <= source < stages
                if takes and board.done[kind, source, m] != number:
                    break
                if kind != FORWARD and board.done[kind - 1, stage, m] != number:
                    break
                takes = takes and ranks_of[source] != rank
                link = costs.links[state.edges[max(stage, source)] - 1, m] if takes else costs.links[0, m]
                needs = kept[stage] if kind == FORWARD else 0.0
                if kind == BACKWARD:
                    needs = max(transient[stage], late[stage] - kept[stage])
                if filling and kind != WEIGHT and seen[rank, WEIGHT] < seen[rank, BACKWARD]:
                    waits = takes and clock[rank, 0] < board.ends[kind, source, m, 0] + link[0]
                    if waits or held[rank] + needs > room[rank]:
                        kind, item, needs, takes = WEIGHT, seen[rank, WEIGHT], 0.0, False
                        m, stage = (
                            state.orders[rank, 1, MICROBATCH, item],
                            stages_of[rank, state.orders[rank, 1, CHUNK, item]],
                        )
                if held[rank] + needs > room[rank]:
                    return np.inf
                first, end = state.edges[stage], state.edges[stage + 1]
                for case in range(cases):
                    clock_now = clock[rank, case]
                    if takes:
                        clock_now = max(clock_now, board.ends[kind, source, m, case] + link[case])
                    clock_now += costs.seconds[kind, end, m, case] - costs.seconds[kind, first, m, case]
                    if kind == BACKWARD:
                        for way in range(costs.again.shape[0]):
                            clock_now += state.again[stage, way] * costs.again[way, m, case]
                    clock[rank, case] = clock_now + costs.action_seconds
                    if kind != WEIGHT:
                        board.ends[kind, stage, m, case] = clock[rank, case]
                board.done[kind, stage, m] = number
                held[rank] += kept[stage] if kind == FORWARD else -late[stage]
                if kind == BACKWARD:
                    held[rank] += 2 * late[stage] - kept[stage]
                board.kinds[rank, seen[rank, 0] + seen[rank, 1] + seen[rank, 2]] = kind
                seen[rank, kind] += 1
                left -= 1
                moved = True
    if left:
        return np.inf
    for stage in range(stages):
        step = costs.step[state.edges[stage + 1]] - costs.step[state.edges[stage]]
        for case in range(cases):
            clock[ranks_of[stage], case] += step
    total = 0.0
    for first in range(0, cases, costs.replicas):
        slowest = 0.0
        for case in range(first, first + costs.replicas):
            for rank in range(ranks):
                slowest = max(slowest, clock[rank, case])
        total += slowest
    return total / (cases // costs.replicas) + costs.iteration_seconds


@njit(cache=True)
def _bytes(state: State, costs: Costs) -> tuple[Floats, Floats, Floats, Floats]:  # pragma: no cover - compiled
    """Of stages, for a microbatch: kept, late, and on top while it is recomputed; of ranks: room beside the weights."""
    ranks, stages = state.kinds.shape[0], state.edges.size - 1
    kept, late, transient, room = np.empty(stages), np.empty(stages), np.zeros(stages), np.full(ranks, costs.room)
    for stage in range(stages):
        first, end = state.edges[stage], state.edges[stage + 1]
        room[costs.places.ranks_of[stage]] -= costs.bytes[0, end] - costs.bytes[0, first]
        kept[stage] = costs.bytes[1, end] - costs.bytes[1, first] + costs.received[first]
        late[stage] = costs.bytes[2, end] - costs.bytes[2, first]
        for way in range(costs.again.shape[0]):
            kept[stage] -= state.again[stage, way] * costs.saved[0, way]
            late[stage] -= state.again[stage, way] * costs.saved[1, way]
            if state.again[stage, way]:
                transient[stage] = max(transient[stage], costs.saved[0, way])
    return kept, late, transient, room
