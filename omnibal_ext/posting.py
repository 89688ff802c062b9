"""When each rank of a pipeline starts to receive: early, yet so that nothing that waits can hang the schedule.

A device synchronisation (a timer, the allocator, a module that is loaded late, CUDA_LAUNCH_BLOCKING) waits for every
message that was posted, both ways. Posted too early, a receive waits for a sender who waits for us:

    rank 0   F0 | F1 | post(gradient 0)  F2 ...      rank 1   post(F1) | F0 ...     each may wait for the other

1. Play the schedule with a second for every action, and put all actions of all ranks in one order, by their ends.
2. A tensor is sent right after the action that makes it. Its receiver posts it at the same place of that order: before
   the first action of its own that comes later.

Whatever stands before a place in the order needs only what stands before it. So all of it ends even if every rank waits
at every step for all that it has posted: by induction over the order, no synchronisation anywhere can hang.
"""

from dataclasses import dataclass

from omnibal_ext.schedule import Action, Schedule, check_schedule, dependencies


@dataclass(frozen=True, slots=True)
class Post:
    """Start receiving what `action` waits for from another rank."""

    action: Action

    @property
    def kind(self) -> str:
        """Of the action."""
        return self.action.kind


Postings = list[list[Action | Post]]
"""Per rank its actions in the schedule's order, and before or between them the receives it posts."""


def with_posts(schedule: Schedule, microbatches: int, chunks: int = 1) -> Postings:
    """The schedule with its receives: each tensor that comes from another rank is posted once, before its action.

    Raises UserError as `check_schedule` does.
    """
    receivers = _receivers(schedule, chunks)
    postings: Postings = [[] for _ in schedule]
    for rank, action in _by_end(schedule, check_schedule(schedule, microbatches, chunks), chunks):
        postings[rank].append(action)
        if (receiver := receivers.get((rank, action))) is not None:
            postings[receiver[0]].append(Post(receiver[1]))
    return postings


def _receivers(schedule: Schedule, chunks: int) -> dict[tuple[int, Action], tuple[int, Action]]:
    """(rank, action) -> the (rank, action) elsewhere that waits for what it makes."""
    found = {}
    for rank, actions in enumerate(schedule):
        for action in actions:
            for source, needed in dependencies(action, rank, len(schedule), chunks):
                if source != rank:
                    found[source, needed] = rank, action
    return found


def _by_end(schedule: Schedule, order: list[tuple[int, int]], chunks: int) -> list[tuple[int, Action]]:
    """All (rank, action), by the second at which they end; `order` is any that respects what waits for what."""
    clock = [0] * len(schedule)
    ends: dict[tuple[int, Action], int] = {}
    for rank, position in order:
        action = schedule[rank][position]
        arrivals = (ends[needed] for needed in dependencies(action, rank, len(schedule), chunks))
        clock[rank] = ends[rank, action] = max(clock[rank], *arrivals, 0) + 1
    return sorted(ends, key=lambda place: (ends[place], place[0]))
