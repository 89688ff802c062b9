"""With a replicated vision tower: which rank encodes which images of a microbatch, and when.

The choice depends on the pack, the microbatch's number and the plan alone (`image_assignment.py`), so a resumed run
makes the same one.
"""

from collections import deque
from dataclasses import dataclass

from omnibal_ext.image_assignment import assign_units
from omnibal_ext.schedules.actions import Action, Beside, Schedule


@dataclass(frozen=True)
class EncoderRank:
    """A rank of a replica, which encodes some of its images."""

    parts: tuple[tuple[int, ...], ...]
    """`parts` of the plan's tower."""
    rank: int
    """Pipeline rank."""
    tensor_rank: int
    tensor_ranks: int

    def takes(self, units: tuple[int, ...], microbatch: int) -> list[bool]:
        """For each of a pack's units (by its cost) whether this rank encodes it."""
        ranks = parts_of(self.parts, microbatch)
        if self.rank not in ranks:
            return [False] * len(units)
        index = ranks.index(self.rank) * self.tensor_ranks + self.tensor_rank
        return [worker == index for worker in assign_units(units, microbatch, ranks, self.tensor_ranks)]


def parts_of(parts: tuple[tuple[int, ...], ...], microbatch: int) -> tuple[int, ...]:
    """The pipeline ranks that encode a microbatch; the plan's list is repeated for more microbatches than it has."""
    return parts[microbatch % len(parts)]


def with_encoding(schedule: Schedule, beside: Beside) -> Schedule:
    """The schedule with encodes (E) and their backwards (V) added: E at most as many microbatches before its F as there
    are ranks, so that few image tokens are held, and V at the end. For evaluations, which have no lists in the plan."""
    lists: Schedule = []
    for rank, actions in enumerate(schedule):
        mine = [microbatch for microbatch, parts in enumerate(beside.parts) if rank in parts]
        left, found = deque(mine), list[Action]()
        for action in actions:
            while left and action.kind == "F" and left[0] <= action.microbatch + len(schedule):
                found.append(Action("E", left.popleft(), rank))
            found.append(action)
        lists.append(found + [Action("V", microbatch, rank) for microbatch in mine])
    return lists
