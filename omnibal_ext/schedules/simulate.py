"""Plays any schedule with costs: step time, each rank's timeline, bubble, bytes held.

    start(action)  = max(end of the action before it on its rank, arrival of what it waits for)
    end(action)    = max(start + the device's seconds, launched)
    launched       = the host's seconds for all actions of its rank up to this one: in order, never waiting
    arrival        = end on the other rank + transfer; transfers overlap with work and do not queue
    step           = last end of a rank + its reduction and optimizer step, the slowest rank counts

Stages are numbered in the order the data flows; a `Placement` says on which rank each is. What one stage hands over to
the next on its own rank takes no time. Everything is deterministic; the loop over actions is compiled.

Where a tower stands beside the pipeline, F of the first stage waits for the last of its microbatch's E, and V for the
first stage's B, a hop later where that is on another rank (`omnibal_ext.schedules.beside`).
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.schedules.actions import Action, Beside, Schedule, check_schedule
from omnibal_ext.schedules.beside import (
    BACKWARD,
    ENCODE,
    FORWARD,
    VISION_BACKWARD,
    WEIGHT,
    Encoding,
    hold_beside,
    play_beside,
)
from omnibal_ext.schedules.placement import Placement

_KINDS = "FBWEV"
_CODES = {kind: code for code, kind in enumerate(_KINDS)}


@dataclass(frozen=True)
class Program:
    """A schedule laid flat in an order that respects every wait."""

    placement: Placement
    microbatches: int
    split_backward: bool
    steps: Ints
    """int64 [5, actions]: rank, stage (of E and V the part), kind (0 F, 1 B, 2 W, 3 E, 4 V), microbatch, the other
    rank's action waited for or -1 (of V, and of the first stage's F beside a tower, -1)."""
    beside: Beside | None = None

    @property
    def ranks(self) -> int:
        """Of the pipeline."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """Of all ranks."""
        return self.placement.stages

    def action(self, index: int) -> Action:
        """The schedule's action at an index of this program."""
        _, stage, kind, microbatch, _ = self.steps[:, index].tolist()
        chunk = stage if kind >= ENCODE else self.placement.rank_and_chunk(stage)[1]
        return Action(_KINDS[kind], microbatch, chunk)


@dataclass(frozen=True)
class StageCosts:
    """Costs of every global stage for every microbatch: float64 [stages, microbatches], or [stages] where said."""

    forward: Floats
    backward: Floats
    """Recomputation and weight gradients included."""
    weight: Floats
    """The part of `backward` that W does where the schedule splits it."""
    transfer: Floats
    """Carrying the stage's output to the next stage, and its gradient back; the last stage's is not used."""
    kept: Floats
    """Bytes held from a microbatch's forward to the end of its B."""
    late: Floats
    """Bytes held from then to the end of its W, where the schedule splits the backward."""
    transient: Floats
    """Bytes on top while its backward recomputes."""
    fixed_bytes: Floats
    """[stages] Weights, gradients, optimizer state."""
    step: Floats
    """[stages] Seconds once an iteration: data-parallel reduction and optimizer step."""
    host: Floats | None = None
    """[3, stages] Seconds in which the host launches F, B and W; None: 0. Ignored with a tower beside the pipeline."""


@dataclass(frozen=True)
class Simulation:
    """What happened when a program was played."""

    program: Program
    start: Floats
    """[actions] Seconds, in the program's order."""
    end: Floats
    step_seconds: float
    busy_seconds: Floats
    """[ranks] Work of each rank, the once-an-iteration part left out."""
    peak_bytes: Floats
    """[ranks] Weights and the most that was held at once."""
    bytes_after: Floats
    """[actions] Bytes on the action's rank when it has ended."""

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time, from first start to last end of work, in which they wait."""
        span = float(self.end.max())
        return 1.0 - float(self.busy_seconds.sum()) / (span * self.program.ranks) if span else 0.0

    def timeline(self, rank: int) -> list[tuple[Action, float, float]]:
        """(action, start, end) of a rank, in the order it runs."""
        indices = np.flatnonzero(self.program.steps[0] == rank).tolist()
        return [(self.program.action(i), float(self.start[i]), float(self.end[i])) for i in indices]

    def memory_timeline(self, rank: int) -> list[tuple[float, float]]:
        """(seconds, bytes held from then on) of a rank."""
        indices = np.flatnonzero(self.program.steps[0] == rank).tolist()
        return [(float(self.end[i]), float(self.bytes_after[i])) for i in indices]


def compile_schedule(
    schedule: Schedule, microbatches: int, placement: Placement | None = None, beside: Beside | None = None
) -> Program:
    """Lay a schedule flat; without a placement every rank has one stage.

    Raises UserError, naming rank and action, if it loses work or would deadlock.
    """
    placement = placement or Placement.interleaved(len(schedule))
    stages, chunks = placement.stages, placement.chunks
    fields = [(_CODES[a.kind], a.chunk, a.microbatch, r) for r, actions in enumerate(schedule) for a in actions]
    listed = np.array(fields, dtype=np.int64).reshape(-1, 4).T.copy()
    lengths = np.array([len(actions) for actions in schedule], dtype=np.int64)
    split = any(action.kind == "W" for actions in schedule for action in actions)
    of_parts = listed[0] >= ENCODE
    expected = stages * microbatches * (3 if split else 2) + int(of_parts.sum())
    limits = np.array([[5 if beside else 3], [chunks], [microbatches], [len(schedule)]])
    within = (listed >= 0) & (listed < limits)
    within[1] |= of_parts & (listed[1] == listed[3])
    order = np.empty(0, dtype=np.int64)
    if listed.shape[1] == expected and bool(within.all()):
        stage_of = np.array(placement.stages_of)[listed[3], np.where(of_parts, 0, listed[1])]
        listed[1] = np.where(of_parts, listed[3], stage_of)
        wait = np.array([len(ranks) for ranks in beside.parts] if beside and not beside.ahead else [0] * microbatches)
        order, waits_for = _flatten(listed[:3], lengths, np.array(placement.ranks_of), microbatches, wait)
    if beside or order.size < expected:
        check_schedule(schedule, microbatches, placement, beside)
    assert order.size == expected, "check_schedule accepts what could not be laid flat"
    kind, stage, microbatch, rank = listed[:, order]
    return Program(placement, microbatches, split, np.stack([rank, stage, kind, microbatch, waits_for]), beside)


def simulate(program: Program, costs: StageCosts, encoding: Encoding | None = None) -> Simulation:
    """Play a program; `encoding`: of one with a tower. Costs must be [program.stages, program.microbatches]."""
    ranks, first = program.ranks, program.placement.ranks_of[0]
    start, end, last, busy = _played(program, costs, encoding)
    of_stages = (costs.kept, costs.late if program.split_backward else np.zeros_like(costs.kept), costs.transient)
    fixed, step = program.placement.by_rank(costs.fixed_bytes), program.placement.by_rank(costs.step)
    if encoding is None:
        peak, after = _hold(program.steps, ranks, *of_stages)
    else:
        peak, after = _held_beside(program.steps, start, ranks, first, of_stages, encoding)
        fixed, step = fixed + encoding.fixed_bytes, step + encoding.step
    whole = float((last + step).max())
    return Simulation(program, start, end, whole, busy, peak + fixed, after + fixed[program.steps[0]])


def _held_beside(
    steps: Ints, start: Floats, ranks: int, first: int, of_stages: tuple[Floats, Floats, Floats], encoding: Encoding
) -> tuple[Floats, Floats]:
    """As E and V give bytes to other ranks, in the order in which actions start."""
    order = np.argsort(start, kind="stable")
    peak, in_order = hold_beside(steps[:, order], ranks, first, of_stages, encoding[2:5])
    after = np.empty_like(in_order)
    after[order] = in_order
    return peak, after


def step_seconds(program: Program, costs: StageCosts, encoding: Encoding | None = None) -> float:
    """Only the step time of `simulate`, for searches that play many layouts."""
    step = program.placement.by_rank(costs.step) + (0.0 if encoding is None else encoding.step)
    return float((_played(program, costs, encoding)[2] + step).max())


def _played(program: Program, costs: StageCosts, encoding: Encoding | None) -> tuple[Floats, Floats, Floats, Floats]:
    """(start, end) of every action; (last end, work) of every rank."""
    found: tuple[Floats, Floats, Floats, Floats]
    seconds = _seconds(program, costs)
    if encoding is None:
        host = np.zeros((3, program.stages)) if costs.host is None else costs.host
        found = _play(program.steps, program.ranks, seconds, costs.transfer, host)
    else:
        first, waited = program.placement.ranks_of[0], program.beside is not None and not program.beside.ahead
        of_stages, of_parts = (seconds, costs.transfer), (encoding.seconds, encoding.hops)
        found = play_beside(program.steps, program.ranks, first, waited, of_stages, of_parts)
    return found


def _seconds(program: Program, costs: StageCosts) -> Floats:
    """float64 [3, stages, microbatches]: what F, B and W take."""
    backward = costs.backward - costs.weight if program.split_backward else costs.backward
    return np.stack([costs.forward, backward, costs.weight])


@njit(cache=True)
def _flatten(
    listed: Ints, lengths: Ints, ranks_of: Ints, microbatches: int, parts: Ints
) -> tuple[Ints, Ints]:  # pragma: no cover - compiled
    """Run every rank as far as it can, round and round; returns the order found (short if stuck) and the waits.

    `listed` int64 [3, actions] has kind, stage and microbatch, rank after rank, `lengths` actions each; the first stage
    waits for so many `parts` of every microbatch. Action number order[i] is the i-th, and waits for the
    order[waits_for[i]] of another rank (-1: for none).
    """
    stages = ranks_of.size
    first = np.zeros(lengths.size + 1, dtype=np.int64)
    first[1:] = np.cumsum(lengths)
    at = first[:-1].copy()
    done = np.full((5, stages, microbatches), -1, dtype=np.int64)
    encoded = np.zeros(microbatches, dtype=np.int64)
    order = np.empty(listed.shape[1], dtype=np.int64)
    waits_for = np.full(listed.shape[1], -1, dtype=np.int64)
    count, moved = 0, True
    while moved:
        moved = False
        for rank in range(lengths.size):
            while at[rank] < first[rank + 1]:
                kind, stage, microbatch = listed[:, at[rank]]
                needed, source = -1, stage - 1 if kind == FORWARD else stage + 1
                if kind == FORWARD and stage == 0 and encoded[microbatch] < parts[microbatch]:
                    break
                if kind == VISION_BACKWARD and done[BACKWARD, 0, microbatch] < 0:
                    break
                if kind < WEIGHT and 0 <= source < stages:
                    needed = done[kind, source, microbatch]
                    if needed < 0:
                        break
                    if ranks_of[source] == rank:
                        needed = -1
                if kind > 0 and kind != ENCODE and done[kind - 1, stage, microbatch] < 0:
                    break
                if done[kind, stage, microbatch] >= 0:
                    return order[:count], waits_for[:count]
                done[kind, stage, microbatch] = count
                encoded[microbatch] += kind == ENCODE
                order[count], waits_for[count] = at[rank], needed
                count += 1
                at[rank] += 1
                moved = True
    return order[:count], waits_for[:count]


@njit(cache=True)
def _play(
    steps: Ints, ranks: int, seconds: Floats, transfer: Floats, host: Floats
) -> tuple[Floats, Floats, Floats, Floats]:  # pragma: no cover - compiled
    """(start, end) of every action; (last end, work) of every rank."""
    count = steps.shape[1]
    start = np.empty(count)
    end = np.empty(count)
    clock = np.zeros(ranks)
    launched = np.zeros(ranks)
    busy = np.zeros(ranks)
    for i in range(count):
        rank, stage, kind, microbatch = steps[0, i], steps[1, i], steps[2, i], steps[3, i]
        launched[rank] += host[kind, stage]
        begin = clock[rank]
        if steps[4, i] >= 0:
            link = stage - 1 if kind == FORWARD else stage
            begin = max(begin, end[steps[4, i]] + transfer[link, microbatch])
        work = seconds[kind, stage, microbatch]
        start[i] = begin
        end[i] = max(begin + work, launched[rank])
        clock[rank] = end[i]
        busy[rank] += work
    return start, end, clock, busy


@njit(cache=True)
def _hold(
    steps: Ints, ranks: int, kept: Floats, late: Floats, transient: Floats
) -> tuple[Floats, Floats]:  # pragma: no cover - compiled
    """(peak of every rank, held after every action): F takes, B gives back all but what W needs."""
    held = np.zeros(ranks)
    peak = np.zeros(ranks)
    after = np.empty(steps.shape[1])
    for i in range(steps.shape[1]):
        rank, stage, kind, microbatch = steps[0, i], steps[1, i], steps[2, i], steps[3, i]
        if kind == FORWARD:
            held[rank] += kept[stage, microbatch]
        elif kind == BACKWARD:
            peak[rank] = max(peak[rank], held[rank] + transient[stage, microbatch])
            held[rank] += late[stage, microbatch] - kept[stage, microbatch]
        else:
            held[rank] -= late[stage, microbatch]
        peak[rank] = max(peak[rank], held[rank])
        after[i] = held[rank]
    return peak, after
