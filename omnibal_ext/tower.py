"""Which rank encodes which images of a microbatch, where the vision tower stands beside the pipeline, and when.

Who encodes follows from the pack, the microbatch and the plan alone (`image_assignment.py`): resuming is a position.
"""

from collections import deque
from dataclasses import dataclass

from omnibal_ext.image_assignment import assign_units
from omnibal_ext.schedules.actions import Action, Beside, Schedule


@dataclass(frozen=True)
class Worker:
    """A rank of a replica that encodes images."""

    parts: tuple[tuple[int, ...], ...]
    """Of the plan."""
    rank: int
    """In the pipeline."""
    tensor_rank: int
    tensor_ranks: int

    def takes(self, units: tuple[int, ...], microbatch: int) -> list[bool]:
        """Of every unit of a pack whether it encodes it."""
        ranks = parts_of(self.parts, microbatch)
        if self.rank not in ranks:
            return [False] * len(units)
        own = ranks.index(self.rank) * self.tensor_ranks + self.tensor_rank
        return [worker == own for worker in assign_units(units, microbatch, ranks, self.tensor_ranks)]


def parts_of(parts: tuple[tuple[int, ...], ...], microbatch: int) -> tuple[int, ...]:
    """The pipeline ranks that encode a microbatch; where there are more than the plan has, they begin anew."""
    return parts[microbatch % len(parts)]


def encoded_in_time(schedule: Schedule, beside: Beside) -> Schedule:
    """Lists for any number of microbatches: E as many in front of their F as there are ranks, V at the end.

    For what no plan has lists for: evaluations. Few image tokens wait at a time, and no rank for the next one's F.
    """
    lists: Schedule = []
    for rank, actions in enumerate(schedule):
        mine = [microbatch for microbatch, parts in enumerate(beside.parts) if rank in parts]
        left, woven = deque(mine), list[Action]()
        for action in actions:
            while left and action.kind == "F" and left[0] <= action.microbatch + len(schedule):
                woven.append(Action("E", left.popleft(), rank))
            woven.append(action)
        lists.append(woven + [Action("V", microbatch, rank) for microbatch in mine])
    return lists
