"""State of the annealing search, and its step time: a clock that finds the order of lists while it plays them.

Each rank goes on until it waits for another that is not so far, round and round: lists that deadlock end early. The
loops of `schedules.clock` would have to find the order and then play it case by case: on 16 cases of 252 actions that
takes 2.9 times as long, lists laid flat and bytes not counted, and W could not be filled in on the way. Numbers are
assigned one by one: assigning slices takes numba longer to compile than all else.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.schedules.actions import BACKWARD, FORWARD, WEIGHT
from omnibal_ext.schedules.clock import moved_bytes
from omnibal_ext.schedules.weaving import NONE

MICROBATCH, CHUNK = 0, 1


class State(NamedTuple):
    """What annealing changes: all ranks' lists, all stages' layers, which ranks encode which microbatch when."""

    kinds: Ints
    """[ranks, actions] 0 F, 1 B, 2 W: the n-th of a kind is the n-th of its order. W may be left out, to be filled
    in."""
    orders: Ints
    """[ranks, 2, 2, items] Microbatch and chunk of forwards, and of backwards; W follow the order of backwards."""
    edges: Ints
    """[stages + 1] Stage s holds layers edges[s] .. edges[s + 1] - 1."""
    recomputed: Ints
    """[stages, options] Number of layers that are recomputed, see `tables.Columns`."""
    insertions: Ints
    """[2, ranks, microbatches] How many of `kinds` run before an E or V of a tower; `NONE`: it is not on this rank."""


class Costs(NamedTuple):
    """Seconds and bytes by which a state is judged. Prefix sums over the chain have [..., layers + 1, ...]."""

    seconds: Floats
    """[3, layers + 1, microbatches, cases] Prefix sums of F, B and W."""
    recompute: Floats
    """[options, microbatches, cases] Seconds to recompute a layer."""
    transfers: Floats
    """[layers, microbatches, cases] Seconds to carry a layer's output."""
    tower_seconds: Floats
    """[ranks, 2, microbatches, cases] Seconds of E and V if row + 1 ranks share a microbatch."""
    hops: Floats
    """[ranks, microbatches, cases] Seconds between an encoding rank and the first stage, if row + 1 ranks share."""
    step: Floats
    """[layers + 1] Prefix sums of seconds once an iteration."""
    holds: Ints
    """[options, layers + 1] Prefix sums: layers of the option's kind."""
    of_option: Ints
    """[options] Each one's kind, as a column of `tables`."""
    bytes: Floats
    """[3, layers + 1] Prefix sums: fixed, kept from F to B, and from B to W."""
    received: Floats
    """[layers + 1] Bytes kept of features that a stage receives if it begins with each layer."""
    saved: Floats
    """[2, options] (kept, late) bytes that recomputing a layer saves."""
    encoded: Floats
    """[ranks] Bytes from E to V if row + 1 ranks share a microbatch."""
    room: Floats
    """[ranks] Bytes for layers and activations."""
    rank_step: Floats
    """[ranks] Seconds once an iteration besides those of layers."""
    ranks_of: Ints
    """[stages] Rank of every stage."""
    stages_of: Ints
    """[ranks, chunks] Stages of every rank."""
    offered: Ints
    """[offered] Options to choose from."""
    action_seconds: float
    split: bool
    """Whether W are apart from B."""
    ahead: bool
    """Whether E are the next iteration's, and have no V."""
    replicas: int
    """Data-parallel ranks: so many neighbouring cases are one iteration, which ends with the last of them."""


class Stages(NamedTuple):
    """Seconds and bytes of a state's stages."""

    seconds: Floats
    """[3, stages, microbatches, cases]"""
    transfers: Floats
    """[stages, microbatches, cases] Seconds from each stage to the next."""
    taken: Floats
    """[3, stages] Bytes that F, B and W of a microbatch take; negative: free."""
    needs: Floats
    """[3, stages] Bytes that must be free when they begin: in B, those of the layers that are recomputed."""
    room: Floats
    """[ranks] Bytes that the weights leave."""
    step: Floats
    """[ranks] Seconds once an iteration."""


class Board(NamedTuple):
    """Scratch arrays of `step_seconds`, kept from one call (a play) to the next."""

    done: Ints
    """[3, stages, microbatches] Number of the last play in which F, B or W was done."""
    ends: Floats
    """[2, stages, microbatches, cases] When F and B ended in that play."""
    kinds: Ints
    """[ranks, actions] Kinds of what was done, in order, without E and V."""


@njit(cache=True)
def board_of(state: State, costs: Costs) -> Board:  # pragma: no cover - compiled
    """Make the scratch arrays for plays of a state, with nothing done."""
    stages, microbatches, cases = state.edges.size - 1, costs.recompute.shape[1], costs.recompute.shape[2]
    actions = (3 if costs.split else 2) * state.orders.shape[3]
    done, ends = np.full((3, stages, microbatches), -2), np.empty((2, stages, microbatches, cases))
    return Board(done, ends, np.empty((state.kinds.shape[0], actions), dtype=np.int64))


@njit(cache=True)
def stages_of(state: State, costs: Costs) -> Stages:  # pragma: no cover - compiled
    """Sum seconds and bytes of the layers between a state's cuts, stage by stage."""
    stages, microbatches, cases = state.edges.size - 1, costs.recompute.shape[1], costs.recompute.shape[2]
    seconds, transfers = np.empty((3, stages, microbatches, cases)), np.empty((stages, microbatches, cases))
    taken, needs = np.empty((3, stages)), np.zeros((3, stages))
    room, step = costs.room.copy(), costs.rank_step.copy()
    for stage in range(stages):
        first, end, rank = state.edges[stage], state.edges[stage + 1], costs.ranks_of[stage]
        for m in range(microbatches):
            for case in range(cases):
                for kind in range(3):
                    of_kind = costs.seconds[kind, end, m, case] - costs.seconds[kind, first, m, case]
                    seconds[kind, stage, m, case] = of_kind + costs.action_seconds
                for option in range(costs.recompute.shape[0]):
                    recomputed = state.recomputed[stage, option]
                    seconds[BACKWARD, stage, m, case] += recomputed * costs.recompute[option, m, case]
                transfers[stage, m, case] = costs.transfers[end - 1, m, case]
        room[rank] -= costs.bytes[0, end] - costs.bytes[0, first]
        step[rank] += costs.step[end] - costs.step[first]
        kept = costs.bytes[1, end] - costs.bytes[1, first] + costs.received[first]
        late = costs.bytes[2, end] - costs.bytes[2, first]
        for option in range(costs.recompute.shape[0]):
            kept -= state.recomputed[stage, option] * costs.saved[0, option]
            late -= state.recomputed[stage, option] * costs.saved[1, option]
            if state.recomputed[stage, option]:
                needs[BACKWARD, stage] = max(needs[BACKWARD, stage], costs.saved[0, option])
        taken[FORWARD, stage], taken[BACKWARD, stage], taken[WEIGHT, stage] = moved_bytes(kept, late)
        for kind in range(3):
            needs[kind, stage] = max(needs[kind, stage], taken[kind, stage])
    return Stages(seconds, transfers, taken, needs, room, step)


@njit(cache=True)
def step_seconds(  # noqa: PLR0912, PLR0915 (calls in the loop would take longer than all else)
    state: State, stages: Stages, costs: Costs, board: Board, number: int
) -> float:  # pragma: no cover - compiled
    """Play a state's lists, and return the step's seconds: the mean over iterations of the slowest data-parallel rank;
    inf if the lists deadlock or a rank lacks bytes.

    Where lists of a split backward leave out W, they are filled in: a rank does its oldest W where it would wait for
    another rank (judged by case 0 alone), or lacks the bytes for its next action. What each rank did, without E and V,
    is in `board.kinds` afterwards. `number`: one that no earlier play on this board had.
    """
    kinds, orders, _, _, insertions = state  # in names of their own: tuples' arrays are counted at every use
    seconds, transfers, taken, needs, room, step = stages
    done, ends, listed = board
    tower_seconds, hops, encoded, ranks_of, on_rank = (
        costs.tower_seconds,
        costs.hops,
        costs.encoded,
        costs.ranks_of,
        costs.stages_of,
    )
    (ranks, length), (_, microbatches, cases), items = kinds.shape, costs.recompute.shape, orders.shape[3]
    ahead, replicas, filling = costs.ahead, costs.replicas, length < listed.shape[1]
    seen, nexts = np.zeros((ranks, 3), dtype=np.int64), np.zeros((2, ranks), dtype=np.int64)
    held, clock, features = np.zeros(ranks), np.zeros((ranks, cases)), np.zeros((microbatches, cases))
    sharing, made = np.zeros(microbatches, dtype=np.int64), np.zeros(microbatches, dtype=np.int64)
    left, moved = listed.size, True
    for rank in range(ranks):
        for m in range(microbatches):
            sharing[m] += insertions[0, rank, m] != NONE
            left += (insertions[0, rank, m] != NONE) + (insertions[1, rank, m] != NONE)
    while moved:
        moved = False
        for rank in range(ranks):
            count = seen[rank, FORWARD] + seen[rank, BACKWARD] + seen[rank, WEIGHT]
            at = count - filling * seen[rank, WEIGHT]
            while True:
                for of in range(2):
                    while nexts[of, rank] < microbatches and insertions[of, rank, nexts[of, rank]] == NONE:
                        nexts[of, rank] += 1
                e, v = nexts[0, rank], nexts[1, rank]
                e_point = insertions[0, rank, e] if e < microbatches else length + 1
                v_point = insertions[1, rank, v] if v < microbatches else length + 1
                if e_point <= at and e_point <= v_point:
                    held[rank] += encoded[sharing[e] - 1]
                    if held[rank] > room[rank]:
                        return np.inf
                    for case in range(cases):
                        clock[rank, case] += tower_seconds[sharing[e] - 1, 0, e, case]
                        hop = hops[sharing[e] - 1, e, case] if rank != ranks_of[0] else 0.0
                        features[e, case] = max(features[e, case], clock[rank, case] + hop)
                    made[e] += 1
                    nexts[0, rank] += 1
                elif v_point <= at:
                    if done[BACKWARD, 0, v] != number:
                        break
                    if e <= v:
                        return np.inf
                    for case in range(cases):
                        hop = hops[sharing[v] - 1, v, case] if rank != ranks_of[0] else 0.0
                        begin = max(clock[rank, case], ends[BACKWARD, 0, v, case] + hop)
                        clock[rank, case] = begin + tower_seconds[sharing[v] - 1, 1, v, case]
                    held[rank] -= encoded[sharing[v] - 1]
                    nexts[1, rank] += 1
                elif at < length or (filling and seen[rank, WEIGHT] < items):
                    kind = kinds[rank, at] if at < length else WEIGHT
                    item, of = seen[rank, kind], min(kind, 1)
                    m, stage = orders[rank, of, MICROBATCH, item], on_rank[rank, orders[rank, of, CHUNK, item]]
                    source = stage - 1 if kind == FORWARD else stage + 1
                    takes = kind != WEIGHT and 0 <= source < ranks_of.size
                    if takes and done[kind, source, m] != number:
                        break
                    if kind != FORWARD and done[kind - 1, stage, m] != number:
                        break
                    enters = kind == FORWARD and stage == 0 and not ahead
                    if enters and made[m] < sharing[m]:
                        break
                    takes, link = takes and ranks_of[source] != rank, min(stage, source)
                    if filling and kind != WEIGHT and seen[rank, WEIGHT] < seen[rank, BACKWARD]:
                        waits = takes and clock[rank, 0] < ends[kind, source, m, 0] + transfers[link, m, 0]
                        if waits or held[rank] + needs[kind, stage] > room[rank]:
                            kind, item, takes, enters = WEIGHT, seen[rank, WEIGHT], False, False
                            m, stage = orders[rank, 1, MICROBATCH, item], on_rank[rank, orders[rank, 1, CHUNK, item]]
                    if held[rank] + needs[kind, stage] > room[rank]:
                        return np.inf
                    for case in range(cases):
                        begin = clock[rank, case]
                        if takes:
                            begin = max(begin, ends[kind, source, m, case] + transfers[link, m, case])
                        elif enters:
                            begin = max(begin, features[m, case])
                        clock[rank, case] = begin + seconds[kind, stage, m, case]
                        if kind != WEIGHT:
                            ends[kind, stage, m, case] = clock[rank, case]
                    done[kind, stage, m] = number
                    held[rank] += taken[kind, stage]
                    listed[rank, count] = kind
                    seen[rank, kind] += 1
                    count += 1
                    at += not filling or kind != WEIGHT
                else:
                    break
                left -= 1
                moved = True
    total = np.inf if left else 0.0
    for begin_case in range(0, cases, replicas):
        slowest = 0.0
        for case in range(begin_case, begin_case + replicas):
            for rank in range(ranks):
                slowest = max(slowest, clock[rank, case] + step[rank])
        total += slowest
    return total / (cases // replicas)
