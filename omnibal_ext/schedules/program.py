"""Lists of actions as a program: what every action waits for, and one order in which all of them can run.

`with_posts`: when each rank starts to receive: early, yet so that nothing that waits can hang the schedule. A device
synchronisation (a timer, the allocator, a module that is loaded late, CUDA_LAUNCH_BLOCKING) waits for every message
that was posted, both ways. Posted too early, a receive waits for a sender who waits for us:

    rank 0   F0 | F1 | post(gradient 0)  F2 ...      rank 1   post(F1) | F0 ...     each may wait for the other

1. Play the schedule with a second for every action, and put all actions of all ranks in one order, by their ends.
2. A tensor is sent right after the action that makes it. Its receiver posts it at the same place of that order: before
   the first action of its own that comes later.

Whatever comes before a place in the order needs only what comes before it. So all of it ends even if every rank waits
at every step for all that it has posted: by induction over the order, no synchronisation anywhere can hang.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.errors import UserError
from omnibal_ext.schedules.actions import (
    ENCODE,
    ENCODE_BACKWARD,
    KINDS,
    OF_TOWER,
    WEIGHT,
    Action,
    Beside,
    Schedule,
    takers,
)
from omnibal_ext.schedules.clock import Rows, Seconds, in_order, play
from omnibal_ext.schedules.placement import Placement

WITHIN = -1
"""Stands for the transfer where an action waits for another of its own rank."""


@dataclass(frozen=True)
class Program:
    """Lists of actions of all ranks, in one order that respects every wait."""

    placement: Placement
    microbatches: int
    split_backward: bool
    listed: Sequence[tuple[int, Action]]
    """(rank, action) of every row."""
    rows: Rows

    @property
    def steps(self) -> Ints:
        """int64 [4, actions]: rank, stage (for E and V the rank), kind (an index of `KINDS`), microbatch."""
        return self.rows.steps

    @property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return self.placement.ranks

    @property
    def stages(self) -> int:
        """Number of stages on all ranks."""
        return self.placement.stages

    def by_second(self) -> dict[tuple[int, Action], int]:
        """Return when each (rank, action) ends if every action takes one second and every transfer none."""
        shape = (len(KINDS), self.stages, 1, self.microbatches)
        ends = play(self.rows, Seconds(np.ones(shape), np.zeros(shape[1:]), np.zeros(shape[:2])), 0)[1]
        return dict(zip(self.listed, ends.astype(int).tolist(), strict=True))


def compile_schedule(schedule: Schedule, microbatches: int, placement: Placement | None = None) -> Program:
    """Order all ranks' actions so that each comes behind what it waits for; without a placement a rank has one stage.

    Raises UserError, naming rank and action, if work is missing or done twice, or if the lists would deadlock.
    """
    placement = placement or Placement.interleaved(len(schedule))
    listed = [(rank, action) for rank, actions in enumerate(schedule) for action in actions]
    fields = np.array([(rank, a.chunk, KINDS.index(a.kind), a.microbatch) for rank, a in listed], dtype=np.int64)
    steps = _steps(fields.reshape(-1, 4).T, placement, microbatches)
    if steps is None:
        _check_work(schedule, microbatches, placement, Beside.of(schedule, microbatches))
    assert steps is not None, "what has all of its work is laid flat"
    waits = _waits(steps, placement.stages, microbatches)
    order = in_order(np.array([len(actions) for actions in schedule]), begins(waits[0], len(listed)), waits[1])
    if order.size < len(listed):
        _refuse_deadlock(listed, order, waits)
    waits = waits[:, waits[2] != WITHIN]
    waits[:2] = np.argsort(order)[waits[:2]]
    waits = waits[:, np.argsort(waits[0], kind="stable")]
    rows = Rows(steps[:, order], begins(waits[0], len(listed)), waits[1:].copy(), placement.ranks)
    split = bool((steps[2] == WEIGHT).any())
    return Program(placement, microbatches, split, [listed[action] for action in order.tolist()], rows)


def _steps(listed: Ints, placement: Placement, microbatches: int) -> Ints | None:
    """Return (rank, stage, kind, microbatch) of actions given as (rank, chunk, kind, microbatch), int64 [4, actions];
    None if work is missing, doubled or unknown."""
    rank, chunk, kind, microbatch = listed
    vision = kind >= ENCODE
    known = (microbatch < microbatches) & np.where(vision, chunk == rank, chunk < placement.chunks)
    if not known.all() or (rank >= placement.ranks).any():
        return None
    stage = np.where(vision, rank, np.array(placement.stages_of)[rank, np.where(vision, 0, chunk)])
    steps = np.stack([rank, stage, kind, microbatch])
    there = _at(steps, placement.stages, microbatches) >= 0
    whole = there.sum() == rank.size and there[: 3 if there[WEIGHT].any() else 2].all()
    returned = not there[ENCODE_BACKWARD].any() or np.array_equal(there[ENCODE], there[ENCODE_BACKWARD])
    return steps if whole and returned else None


def _at(steps: Ints, stages: int, microbatches: int) -> Ints:
    """Return the index in `steps` of each action, int64 [kinds, stages, microbatches]; -1: there is none."""
    at = np.full((len(KINDS), stages, microbatches), -1)
    at[steps[2], steps[1], steps[3]] = np.arange(steps.shape[1])
    return at


def _waits(steps: Ints, stages: int, microbatches: int) -> Ints:
    """Return int64 [3, waits]: an action, one it waits for, the row of their transfer (or `WITHIN`); sorted by the
    first.

    F waits for the stage before, B for its own F and one stage later, W for its B. F of the first stage waits for all E
    of its microbatch, and V for its E and the first stage's B. Without V the E are the next iteration's, and nothing
    waits for them.
    """
    f, b, w, e, v = _at(steps, stages, microbatches)
    transfers = np.arange(stages)[:, None]
    pairs: list[tuple[Ints | int, ...]] = [(b, f, 0), (w, b, 0), (v, e, 0)]
    pairs += [(f[1:], f[:-1], transfers[:-1]), (b[:-1], b[1:], transfers[:-1]), (v, b[:1], transfers[-1])]
    if (v >= 0).any():
        pairs.append((f[:1], e, transfers[-1]))
    found = np.concatenate([np.stack(np.broadcast_arrays(*pair)).reshape(3, -1) for pair in pairs], axis=1)
    found = found[:, (found[:2] >= 0).all(axis=0)]
    found[2, steps[0, found[0]] == steps[0, found[1]]] = WITHIN
    return np.asarray(found[:, np.argsort(found[0], kind="stable")])


def begins(sorted_rows: Ints, rows: int) -> Ints:
    """Return where each row 0, 1, ... begins in `sorted_rows` (ascending numbers), and the end: int64 [rows + 1]."""
    return np.searchsorted(sorted_rows, np.arange(rows + 1))


def _refuse_deadlock(listed: Sequence[tuple[int, Action]], order: Ints, waits: Ints) -> None:
    """Raise UserError naming the first action that never runs, and one that it waits for."""
    done = np.isin(np.arange(len(listed)), order)
    stuck = int(np.flatnonzero(~done)[0])
    (rank, action), (other, needed) = (
        listed[one] for one in (stuck, waits[1, (waits[0] == stuck) & ~done[waits[1]]][0])
    )
    raise UserError(
        f"schedule deadlocks: rank {rank} waits for ever at {action} for {needed} of rank {other}; "
        "put that earlier in its list"
    )


def check_schedule(
    schedule: Schedule, microbatches: int, placement: Placement | None = None, beside: Beside | None = None
) -> Program:
    """Run `compile_schedule`, and check that E and V are those of `beside`, each in the order of microbatches. Raises
    UserError naming rank and action."""
    placement = placement or Placement.interleaved(len(schedule))
    _check_work(schedule, microbatches, placement, beside)
    for rank, actions in enumerate(schedule):
        for kind in OF_TOWER:
            for action, following in pairwise(action for action in actions if action.kind == kind):
                if following.microbatch < action.microbatch:
                    raise UserError(
                        f"schedule: rank {rank} runs {following} behind {action}; put the {kind} of a rank in "
                        "the order of microbatches"
                    )
    return compile_schedule(schedule, microbatches, placement)


def _check_work(schedule: Schedule, microbatches: int, placement: Placement, beside: Beside | None) -> None:
    """Raise UserError unless each rank has all of its work exactly once, and nothing else."""
    kinds = ("F", "B", "W") if any(a.kind == "W" for actions in schedule for a in actions) else ("F", "B")
    of_stages = {Action(kind, m, c) for kind in kinds for m in range(microbatches) for c in range(placement.chunks)}
    for rank, actions in enumerate(schedule):
        wanted = of_stages | beside.work(rank) if beside else of_stages
        seen: set[Action] = set()
        for action in actions:
            if action not in wanted or action in seen:
                raise UserError(
                    f"schedule: rank {rank} has {action} {'twice' if action in seen else 'but no such work'}"
                )
            seen.add(action)
        if seen != wanted:
            missing = min(wanted - seen, key=lambda a: (a.microbatch, a.chunk, KINDS.index(a.kind)))
            raise UserError(f"schedule: rank {rank} never does {missing}")


@dataclass(frozen=True, slots=True)
class Post:
    """An entry of a rank's list that starts to receive, for its `action`, what `giver` makes, a (rank, action)."""

    action: Action
    giver: tuple[int, Action]

    @property
    def kind(self) -> str:
        """Kind of the action that takes what is received."""
        return self.action.kind


Postings = list[list[Action | Post]]
"""Every rank's actions in the schedule's order, with the receives it posts between them."""


def with_posts(schedule: Schedule, microbatches: int, placement: Placement | None = None) -> Postings:
    """Return the schedule with its receives: each tensor from another rank is posted once, before the action that takes
    it.

    What E make for the next iteration (`Beside.ahead`) is posted in this one, behind or before its F of the same
    number. Without a placement every rank has one stage. Raises UserError as `compile_schedule` does.
    """
    placement = placement or Placement.interleaved(len(schedule))
    postings: Postings = [[] for _ in schedule]
    ends, beside = compile_schedule(schedule, microbatches, placement).by_second(), Beside.of(schedule, microbatches)
    for rank, action in sorted(ends, key=lambda key: (ends[key], key[0])):
        postings[rank].append(action)
        for receiver, taking in takers(action, rank, placement, beside):
            if receiver != rank:
                postings[receiver].append(Post(taking, (rank, action)))
    return postings
