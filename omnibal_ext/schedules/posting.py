"""When each rank of a pipeline starts to receive: early, yet so that nothing that waits can hang the schedule.

A device synchronisation (a timer, the allocator, a module that is loaded late, CUDA_LAUNCH_BLOCKING) waits for every
message that was posted, both ways. Posted too early, a receive waits for a sender who waits for us:

    rank 0   F0 | F1 | post(gradient 0)  F2 ...      rank 1   post(F1) | F0 ...     each may wait for the other

1. Play the schedule with a second for every action, and put all actions of all ranks in one order, by their ends.
2. A tensor is sent right after the action that makes it. Its receiver posts it at the same place of that order: before
   the first action of its own that comes later.

Whatever comes before a place in the order needs only what comes before it. So all of it ends even if every rank waits
at every step for all that it has posted: by induction over the order, no synchronisation anywhere can hang.
"""

from dataclasses import dataclass

from omnibal_ext.schedules.actions import Action, Beside, Schedule, takers
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import compile_schedule


@dataclass(frozen=True, slots=True)
class Post:
    """Start receiving what `giver`, a (rank, action), makes for `action`."""

    action: Action
    giver: tuple[int, Action]

    @property
    def kind(self) -> str:
        """Of the action."""
        return self.action.kind


Postings = list[list[Action | Post]]
"""Per rank its actions in the schedule's order, and before or between them the receives it posts."""


def with_posts(schedule: Schedule, microbatches: int, placement: Placement | None = None) -> Postings:
    """The schedule with its receives: each tensor that comes from another rank is posted once, before its action.

    What E make for the next iteration (`Beside.ahead`) is posted in this one, behind or before its F of the same
    number. Without a placement every rank has one stage. Raises UserError as `compile_schedule` does.
    """
    placement = placement or Placement.interleaved(len(schedule))
    postings: Postings = [[] for _ in schedule]
    ends, beside = compile_schedule(schedule, microbatches, placement).by_second(), Beside.of(schedule, microbatches)
    for rank, action in sorted(ends, key=lambda place: (ends[place], place[0])):
        postings[rank].append(action)
        for receiver, taking in takers(action, rank, placement, beside):
            if receiver != rank:
                postings[receiver].append(Post(taking, (rank, action)))
    return postings
