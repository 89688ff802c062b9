"""Play any schedule with costs: step time, each rank's timeline, bubble, bytes held.

Times come from `omnibal_ext.schedules.clock`. A step's seconds are the slowest rank's: its last end + its reduction and
optimizer step. Stages are numbered in the order the data flows; a `Placement` says on which rank each is. A handover
between two stages of one rank takes no time.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.schedules.actions import BACKWARD, ENCODE, ENCODE_BACKWARD, FORWARD, KINDS, Action
from omnibal_ext.schedules.clock import Moves, Seconds, hold, moved_bytes, play
from omnibal_ext.schedules.program import Program, begins

Move = tuple[Ints, Ints, Floats]
"""Rows of a program, the ranks on which they take bytes, and how many."""


@dataclass(frozen=True)
class StageCosts:
    """Costs of every stage for every microbatch: float64 [stages, microbatches] of seconds or bytes, unless said."""

    forward: Floats
    backward: Floats
    """Seconds, with recomputation and weight gradients."""
    weight: Floats
    """Seconds of `backward` that are W's where the schedule splits it."""
    transfer: Floats
    """Seconds to carry the stage's output to the next stage, or its gradient back; the last stage's is not used."""
    kept: Floats
    """Bytes held from a microbatch's forward to the end of its B."""
    late: Floats
    """Bytes held from the end of B to that of W, where the schedule splits the backward."""
    transient: Floats
    """Bytes on top while the backward recomputes."""
    fixed_bytes: Floats
    """[stages] Weights, gradients, optimizer state."""
    step: Floats
    """[stages] Seconds once an iteration: data-parallel reduction and optimizer step."""
    host: Floats | None = None
    """[3, stages] Seconds in which the host launches F, B and W; None: 0. Ignored with E and V."""


class Encoding(NamedTuple):
    """Seconds and bytes of a replicated tower."""

    seconds: Floats
    """[2, ranks, microbatches] Seconds of E, and of V."""
    hops: Floats
    """[microbatches] Seconds from an encoding rank to the first stage's rank, or back."""
    kept: Floats
    """[ranks, microbatches] Bytes held from E to V."""
    working: Floats
    """[ranks, microbatches] Bytes on top while V runs."""
    waiting: Floats
    """[microbatches] Bytes of one rank's output, held by the first stage's rank from E to F; as many of its gradient,
    from B to V."""
    fixed_bytes: Floats
    """[ranks] Weights, gradients, optimizer state."""
    step: Floats
    """[ranks] Seconds once an iteration: data-parallel reduction and optimizer step."""


@dataclass(frozen=True)
class Simulation:
    """Times and bytes of a program that was played."""

    program: Program
    start: Floats
    """[actions] Seconds, in the program's order."""
    end: Floats
    step_seconds: float
    busy_seconds: Floats
    """[ranks] Work of each rank, without reduction and optimizer step."""
    peak_bytes: Floats
    """[ranks] Weights, and the most that is held at once besides them."""
    bytes_after: Floats
    """[actions] Bytes on the action's rank when it has ended."""

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time in which they wait; the time is from 0 to the last end of an action."""
        span = float(self.end.max())
        return 1.0 - float(self.busy_seconds.sum()) / (span * self.program.ranks) if span else 0.0

    def timeline(self, rank: int) -> list[tuple[Action, float, float]]:
        """Return (action, start, end) of a rank's actions in order, in seconds."""
        indices = np.flatnonzero(self.program.steps[0] == rank).tolist()
        return [(self.program.listed[i][1], float(self.start[i]), float(self.end[i])) for i in indices]

    def memory_timeline(self, rank: int) -> list[tuple[float, float]]:
        """Return (seconds, bytes held from then on) of a rank, one for each of its actions."""
        indices = np.flatnonzero(self.program.steps[0] == rank).tolist()
        return [(float(self.end[i]), float(self.bytes_after[i])) for i in indices]


def simulate(program: Program, costs: StageCosts, encoding: Encoding | None = None) -> Simulation:
    """Simulate an iteration with costs [stages, microbatches] of F, B and W; `encoding`: those of E and V, if any."""
    (rank, stage, kind, microbatch), seconds = program.steps, _seconds(program, costs, encoding)
    start, end, last = play(program.rows, seconds, 0)
    busy = np.bincount(rank, seconds.work[kind, stage, 0, microbatch], program.ranks)
    peak, after = hold(program.steps, *_moves(program, costs, encoding, start))
    fixed, step = program.placement.by_rank(costs.fixed_bytes), program.placement.by_rank(costs.step)
    if encoding is not None:
        fixed, step = fixed + encoding.fixed_bytes, step + encoding.step
    whole = float((last + step).max())
    return Simulation(program, start, end, whole, np.asarray(busy, dtype=np.float64), peak + fixed, after + fixed[rank])


def _seconds(program: Program, costs: StageCosts, encoding: Encoding | None) -> Seconds:
    backward = costs.backward - costs.weight if program.split_backward else costs.backward
    work = np.stack([costs.forward, backward, costs.weight])
    host = np.zeros(work.shape[:2]) if costs.host is None else costs.host
    seconds = Seconds(work[:, :, None], costs.transfer[:, None], host)
    return seconds if encoding is None else with_encoding(seconds, encoding.seconds[:, None], encoding.hops[None])


def with_encoding(seconds: Seconds, tower_seconds: Floats, hops: Floats) -> Seconds:
    """Add the seconds of E and V to those of F, B and W; the host's launches then count 0. `tower_seconds`: of E and V
    on every rank [2, cases, ranks, microbatches]; `hops`: from there to the first stage [cases, microbatches]."""
    work = np.zeros((len(KINDS), *seconds.work.shape[1:]))
    work[:ENCODE], work[ENCODE:, : tower_seconds.shape[2]] = seconds.work, tower_seconds.swapaxes(1, 2)
    transfers = seconds.transfers.copy()
    transfers[-1] = hops
    return Seconds(work, transfers, np.zeros(work.shape[:2]))


def _moves(program: Program, costs: StageCosts, encoding: Encoding | None, start: Floats) -> tuple[Moves, Floats]:
    """Return the bytes that every action takes and frees, and those that ranks hold before the first [ranks]."""
    rank, stage, kind, microbatch = program.steps
    late = costs.late if program.split_backward else np.zeros_like(costs.late)
    taken, on_top = np.zeros((len(KINDS), *costs.kept.shape)), np.full((len(KINDS), *costs.kept.shape), -np.inf)
    taken[:ENCODE], on_top[BACKWARD] = moved_bytes(costs.kept, late), costs.transient
    before: list[Move] = []
    behind: list[Move] = []
    held = np.zeros(program.ranks)
    if encoding is not None:
        taken[ENCODE, : program.ranks], on_top[ENCODE_BACKWARD, : program.ranks] = encoding.kept, encoding.working
        taken[ENCODE_BACKWARD, : program.ranks] = -(encoding.kept + encoding.waiting)
        held, before, behind = _carried(program, encoding)
    own = (np.arange(rank.size), rank, taken[kind, stage, microbatch])
    moves = [np.concatenate(column) for column in zip(*before, own, *behind, strict=True)]
    order = np.argsort(moves[0], kind="stable")
    row, where, size = (column[order] for column in moves)
    in_time = np.argsort(start, kind="stable")
    return Moves(in_time, on_top[kind, stage, microbatch], begins(row, rank.size), where, size), held


def _carried(program: Program, encoding: Encoding) -> tuple[Floats, list[Move], list[Move]]:
    """Return the bytes of the tower's outputs on their way: those on ranks before the first action, and the moves
    (`Move`) that come before and behind the actions' own.

    Outputs of E wait on the first stage's rank for its F, gradients of its B on the encoding ranks for V. What is
    encoded for the next iteration waits to the end, as what is there for this one did before.
    """
    (rank, stage, kind, microbatch), first = program.steps, program.placement.ranks_of[0]
    made = np.flatnonzero(kind == ENCODE)
    entering, leaving = (np.flatnonzero((kind == which) & (stage == 0)) for which in (FORWARD, BACKWARD))
    encoded, held = np.zeros_like(encoding.kept), np.zeros(program.ranks)
    encoded[rank[made], microbatch[made]] = 1.0
    outputs = np.cumsum(encoded * encoding.waiting, axis=0)[-1]
    if not (kind == ENCODE_BACKWARD).any():
        held[first], leaving = np.cumsum(outputs)[-1], leaving[:0]
    which, taker = np.nonzero(encoded.T[microbatch[leaving]])
    leaving = leaving[which]

    def on_first(rows: Ints, size: Floats) -> Move:
        return rows, np.full(rows.size, first), size[microbatch[rows]]

    behind = [on_first(made, encoding.waiting), (leaving, taker, encoding.waiting[microbatch[leaving]])]
    return held, [on_first(entering, -outputs)], behind
