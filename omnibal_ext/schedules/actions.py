"""What pipeline ranks do, as plain data: for every rank, the list of its actions, in order; and what a list must be.

A stage is one contiguous slice of the layer chain; a `Placement` says which (rank, chunk) it is.

F waits for the F of its microbatch one stage earlier; B for that microbatch's F on its own stage and its B one stage
later; W for the B of its own stage. In lists without W, B computes the gradients of inputs and of weights together.
(PyTorch's pipelining calls a B that leaves W out I. Here it needs no name of its own: lists have W for all B, or none.)

With a replicated tower (`Beside`), several ranks may each encode some images of a microbatch, their share of it:

    rank 0   E0.0 F0.0 E1.0 F1.0 B0.0 V0.0 B1.0 V1.0       E3.1: rank 1 encodes its share of microbatch 3
    rank 1   E0.1 F0.0 E1.1 B0.0 F1.0 V0.1 B1.0 V1.1       V3.1: the backward of that share

F of the first stage waits for all E of its microbatch, V for the first stage's B and its own E. A rank's E go in the
order of microbatches, and so do its V: sums of gradients do not depend on their positions.
"""

import re
from dataclasses import dataclass

from omnibal_ext.errors import UserError
from omnibal_ext.schedules.placement import Placement

KINDS = "FBWEV"
FORWARD, BACKWARD, WEIGHT, ENCODE, ENCODE_BACKWARD = range(len(KINDS))
"""Numbers of these kinds: indices of `KINDS`."""
OF_TOWER = ("E", "V")
"""Kinds of actions of a replicated tower."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Who runs the E and V of a replicated tower: the ranks that encode each microbatch, now or an iteration ahead."""

    encoding_ranks: tuple[tuple[int, ...], ...]
    """Pipeline ranks that encode images of each microbatch."""
    ahead: bool = False
    """Whether E encode for the next iteration: no action waits for them, and there are no V, as the tower is frozen."""

    @classmethod
    def of(cls, schedule: "Schedule", microbatches: int) -> "Beside | None":
        """Return which ranks encode what, read off the E and V in lists of actions; None where they have none."""
        found: dict[str, list[list[int]]] = {kind: [[] for _ in range(microbatches)] for kind in OF_TOWER}
        for rank, actions in enumerate(schedule):
            for action in actions:
                if action.kind in OF_TOWER and action.microbatch < microbatches:
                    found[action.kind][action.microbatch].append(rank)
        return cls(tuple(map(tuple, found["E"])), not any(found["V"])) if any(found["E"]) or any(found["V"]) else None

    def work(self, rank: int) -> set["Action"]:
        """Return all E and V that `rank` must run; only E if `ahead`."""
        kinds = "E" if self.ahead else "EV"
        return {Action(kind, m, rank) for kind in kinds for m, ranks in enumerate(self.encoding_ranks) if rank in ranks}


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank: `kind` is "F" forward, "B" backward, "W" gradient of the weights where B leaves it out.

    With a replicated tower "E" encodes images, "V" is their backward, and `chunk` is the rank that runs it.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        what = "rank" if self.kind in OF_TOWER else "chunk"
        return f"{self.kind}(microbatch {self.microbatch}, {what} {self.chunk})"

    @property
    def word(self) -> str:
        """The action in plan.json: "B3.1" is the backward of microbatch 3 in chunk 1, "E3.1" its encoding on rank 1."""
        return f"{self.kind}{self.microbatch}.{self.chunk}"

    @classmethod
    def of_word(cls, word: str) -> "Action":
        """Parse an action of plan.json, such as "B3.1" (see `word`). Raises UserError for any other text."""
        found = re.fullmatch(r"([FBWEV])(\d{1,9})\.(\d{1,9})", word, re.ASCII)
        if found is None:
            raise UserError(
                f"{word[:40]!r} is no action; write F, B, W, E or V, the microbatch, a dot and the chunk: B3.1"
            )
        return cls(found[1], int(found[2]), int(found[3]))


Schedule = list[list[Action]]


def has_weight_gradients(schedule: Schedule) -> bool:
    """Return whether the backward is split into B (inputs) and W (weights)."""
    return any(action.kind == "W" for action in schedule[0])


def counts_of(schedule: Schedule) -> tuple[int, int, int]:
    """Return the numbers of ranks, microbatches and chunks that lists of actions have, E and V not counted."""
    actions = [action for actions in schedule for action in actions if action.kind not in OF_TOWER]
    return len(schedule), 1 + max(a.microbatch for a in actions), 1 + max(a.chunk for a in actions)


def check_packs(schedule: Schedule, chunks: int = 1) -> None:
    """Raise UserError, naming rank and action, unless the F of each chunk come in the order of microbatches, from 0 up.

    Every other order is free: receives are posted in the order of their senders (`omnibal_ext.schedules.program`).
    """
    for rank, actions in enumerate(schedule):
        awaited = [0] * chunks
        for action in actions:
            if action.kind == "F":
                if action.microbatch != awaited[action.chunk]:
                    raise UserError(
                        f"schedule: rank {rank} runs {action} where the pack of microbatch {awaited[action.chunk]} "
                        "comes; put the forwards of a chunk in the order of microbatches"
                    )
                awaited[action.chunk] += 1


def givers(action: Action, rank: int, placement: Placement, beside: Beside | None = None) -> list[tuple[int, Action]]:
    """Return whose outputs `action` of `rank` takes, as (rank, action): for F the stage before, or all E of its
    microbatch; for B the next stage; for V the first stage's B. [] for W and E."""
    if action.kind == "V":
        first, chunk = placement.rank_and_chunk(0)
        return [(first, Action("B", action.microbatch, chunk))]
    if beside and action.kind == "F" and placement.stages_of[rank][action.chunk] == 0:
        return [(one, Action("E", action.microbatch, one)) for one in beside.encoding_ranks[action.microbatch]]
    return _of_neighbour(action, rank, placement, {"F": -1, "B": 1}.get(action.kind, 0))


def takers(action: Action, rank: int, placement: Placement, beside: Beside | None = None) -> list[tuple[int, Action]]:
    """Return who takes the outputs of `action` of `rank`, as (rank, action): the inverse of `givers`.

    With `beside.ahead`, the F that takes an E belongs to the next iteration's list.
    """
    if action.kind == "E":
        first, chunk = placement.rank_and_chunk(0)
        return [(first, Action("F", action.microbatch, chunk))]
    if beside and action.kind == "B" and placement.stages_of[rank][action.chunk] == 0:
        ranks = () if beside.ahead else beside.encoding_ranks[action.microbatch]
        return [(one, Action("V", action.microbatch, one)) for one in ranks]
    return _of_neighbour(action, rank, placement, {"F": 1, "B": -1}.get(action.kind, 0))


def _of_neighbour(action: Action, rank: int, placement: Placement, step: int) -> list[tuple[int, Action]]:
    """Return the action of the same kind `step` stages further on, and its rank; [] beyond the ends of the chain."""
    if not step or not 0 <= (stage := placement.stages_of[rank][action.chunk] + step) < placement.stages:
        return []
    where, chunk = placement.rank_and_chunk(stage)
    return [(where, Action(action.kind, action.microbatch, chunk))]
