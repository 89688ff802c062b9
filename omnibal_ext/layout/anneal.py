"""Simulated annealing over schedule lists and layouts: the compiled part of `lists`."""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from omnibal_ext.packing.random_bits import below
from omnibal_ext.simulate import BACKWARD, FORWARD, WEIGHT

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

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
    """[ranks, actions] 0 F, 1 B, 2 W: the n-th of a kind is the n-th of its order."""
    orders: Ints
    """[2, 2, items] Of forwards, and of backwards, which W follow: microbatch and chunk."""
    edges: Ints
    """[stages + 1] Stage s holds layers edges[s] .. edges[s + 1] - 1."""
    again: Ints
    """[stages, 2] ViT and LLM layers that are recomputed."""


class Costs(NamedTuple):
    """What a state is judged by. Prefix sums over the chain have [..., layers + 1, ...]."""

    seconds: Floats
    """[3, layers + 1, microbatches, cases] Prefix sums of F, B and W."""
    again: Floats
    """[2, microbatches, cases] Running a ViT layer, an LLM layer again."""
    links: Floats
    """[layers, microbatches, cases] Carrying a layer's output."""
    step: Floats
    """[layers + 1] Prefix sums of seconds once an iteration."""
    holds: Ints
    """[2, layers + 1] Prefix sums: ViT layers, LLM layers."""
    bytes: Floats
    """[3, layers + 1] Prefix sums: fixed, kept from F to B, and from B to W."""
    received: Floats
    """[layers + 1] Bytes kept of features that a stage receives which begins with each layer."""
    saved: Floats
    """[2, 2] (kept, late) bytes that recomputing saves of a (ViT, LLM) layer."""
    room: float
    """Bytes of a rank for its layers."""
    action_seconds: float
    iteration_seconds: float
    replicas: int
    """Data-parallel ranks: so many neighbouring cases are one iteration, which ends with the last of them."""


class Board(NamedTuple):
    """Where a play writes down what is done; of an earlier play is what has another number."""

    done: Ints
    """[3, stages, microbatches] Number of the last play in which F, B or W was done."""
    ends: Floats
    """[2, stages, microbatches, cases] When F and B ended."""


@njit(cache=True)
def anneal(
    state: State, costs: Costs, changes: int, warm: float, cold: float, movable: bool, seed: int
) -> tuple[State, float]:  # pragma: no cover - compiled
    """The fastest state met and its step seconds; temperatures `warm` to `cold` in seconds.

    Cuts and recomputed layers change only where `movable`. Never slower than `state`, which must fit.
    """
    stages, microbatches, cases = state.edges.size - 1, costs.again.shape[1], costs.again.shape[2]
    ends = np.empty((2, stages, microbatches, cases))
    board = Board(np.full((3, stages, microbatches), -2), ends)
    here = _step_seconds(state, costs, board, -1)
    best, least = state, here
    for change in range(changes):
        at = change * DRAWS
        other = _changed(state, costs, movable, seed, at)
        if not _fits(other, costs):
            continue
        there = _step_seconds(other, costs, board, change)
        temperature = warm * (cold / warm) ** (change / changes)
        chance = (1 + below(1 << 30, seed, at + DRAWS - 1)) / (1 << 30)
        if there - here <= -temperature * np.log(chance):  # not if infinite
            state, here = other, there
            if here < least:
                best, least = state, here
    return best, least


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
                stage, kind = below(changed.again.shape[0], seed, draw), below(2, seed, draw + 1)
                changed.again[stage, kind] += 2 * below(2, seed, draw + 2) - 1
        for stage in range(changed.again.shape[0]):
            for kind in range(2):
                held = costs.holds[kind, changed.edges[stage + 1]] - costs.holds[kind, changed.edges[stage]]
                changed.again[stage, kind] = max(0, min(changed.again[stage, kind], held))
    return changed


@njit(cache=True)
def _exchange(orders: Ints, seed: int, at: int) -> None:  # pragma: no cover - compiled
    """Exchange two neighbours; forwards of one chunk keep their order, in which their packs come."""
    of, items = below(2, seed, at), orders.shape[2]
    if items == 1:
        return
    i = below(items - 1, seed, at + 1)
    if of == 0 and orders[of, CHUNK, i] == orders[of, CHUNK, i + 1]:
        return
    for row in range(2):
        orders[of, row, i], orders[of, row, i + 1] = orders[of, row, i + 1], orders[of, row, i]


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
        edges[first : last + 1] += by


@njit(cache=True)
def _fits(state: State, costs: Costs) -> bool:  # pragma: no cover - compiled
    """Whether no rank ever holds more than it has, played action by action at the budgets."""
    ranks, stages = state.kinds.shape[0], state.edges.size - 1
    room = np.full(ranks, costs.room)
    kept, late, transient = np.empty(stages), np.empty(stages), np.zeros(stages)
    for s in range(stages):
        own = costs.bytes[:, state.edges[s + 1]] - costs.bytes[:, state.edges[s]]
        room[s % ranks] -= own[0]
        kept[s], late[s] = own[1] + costs.received[state.edges[s]], own[2]
        for kind in range(2):
            kept[s] -= state.again[s, kind] * costs.saved[0, kind]
            late[s] -= state.again[s, kind] * costs.saved[1, kind]
            if state.again[s, kind]:
                transient[s] = max(transient[s], costs.saved[0, kind])
    for rank in range(ranks):
        held, seen = 0.0, np.zeros(3, dtype=np.int64)
        for kind in state.kinds[rank]:
            stage = state.orders[min(kind, 1), CHUNK, seen[kind]] * ranks + rank
            seen[kind] += 1
            if kind == FORWARD:
                held += kept[stage]
            elif kind == BACKWARD:
                if held + transient[stage] > room[rank]:
                    return False
                held += late[stage] - kept[stage]
            else:
                held -= late[stage]
            if held > room[rank]:
                return False
    return True


@njit(cache=True)
def _step_seconds(state: State, costs: Costs, board: Board, number: int) -> float:  # pragma: no cover - compiled
    """Mean over iterations of the slowest data-parallel rank; infinite where the lists deadlock."""
    ranks, length = state.kinds.shape
    stages, cases = state.edges.size - 1, costs.again.shape[2]
    at, seen = np.zeros(ranks, dtype=np.int64), np.zeros((ranks, 3), dtype=np.int64)
    clock = np.zeros((ranks, cases))
    left, moved = ranks * length, True
    while moved:
        moved = False
        for rank in range(ranks):
            while at[rank] < length:
                kind = state.kinds[rank, at[rank]]
                of, item = min(kind, 1), seen[rank, kind]
                m, stage = state.orders[of, MICROBATCH, item], state.orders[of, CHUNK, item] * ranks + rank
                source = stage - 1 if kind == FORWARD else stage + 1 if kind == BACKWARD else -1
                waits = 0 <= source < stages
                if waits and board.done[kind, source, m] != number:
                    break
                if kind != FORWARD and board.done[kind - 1, stage, m] != number:
                    break
                first, end = state.edges[stage], state.edges[stage + 1]
                link = costs.links[(first if kind == FORWARD else end) - 1]
                for case in range(cases):
                    begin = clock[rank, case]
                    if waits:
                        begin = max(begin, board.ends[kind, source, m, case] + link[m, case])
                    begin += costs.seconds[kind, end, m, case] - costs.seconds[kind, first, m, case]
                    if kind == BACKWARD:
                        begin += state.again[stage, 0] * costs.again[0, m, case]
                        begin += state.again[stage, 1] * costs.again[1, m, case]
                    clock[rank, case] = begin + costs.action_seconds
                    if kind != WEIGHT:
                        board.ends[kind, stage, m, case] = clock[rank, case]
                board.done[kind, stage, m] = number
                seen[rank, kind] += 1
                at[rank] += 1
                left -= 1
                moved = True
    if left:
        return np.inf
    for stage in range(stages):
        step = costs.step[state.edges[stage + 1]] - costs.step[state.edges[stage]]
        clock[stage % ranks] += step + costs.iteration_seconds * (stage < ranks)
    total = 0.0
    for iteration in range(cases // costs.replicas):
        total += clock[:, iteration * costs.replicas : (iteration + 1) * costs.replicas].max()
    return total / (cases // costs.replicas)
