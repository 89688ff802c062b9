"""E and V of a tower beside the pipeline, woven into the lists of the language model's stages.

`first`, the form of Kimi K2.5 (arXiv 2602.02276): all images before the pipeline, all their backwards behind it.

    rank 0   E0 E1 | F0 F1    B0 B1    | V0 V1        `placed` elsewhere:  E0 F0 E1 F1    B0 V0 B1 V1
    rank 1   E0 E1 |    F0 B0 F1 B1    | V0 V1                             E0 E1 F0 B0 V0 F1 B1 V1

Where they stand is a number for each, the rank's action that it comes before, so that lists are orders of what is
there: the language model's actions keep theirs, and E, and V, go in the order of microbatches.
"""

from itertools import pairwise

from omnibal_ext.schedules.actions import Action, Beside, Schedule
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import compile_schedule

Places = list[list[tuple[int, Action]]]
"""Of every rank, its E and V, each behind so many of the language model's actions."""


def woven(schedule: Schedule, places: Places) -> Schedule:
    """The language model's lists with E and V at their places; of one place in the order given."""
    lists: Schedule = []
    for actions, mine in zip(schedule, places, strict=True):
        ordered = sorted(enumerate(mine), key=lambda one: (one[1][0], one[0]))
        edges = [0, *(place for _, (place, _) in ordered), len(actions)]
        before, *behind = (actions[first:end] for first, end in pairwise(edges))
        lists.append(before + [a for (_, (_, one)), piece in zip(ordered, behind, strict=True) for a in (one, *piece)])
    return lists


def first_and_last(schedule: Schedule, beside: Beside) -> Places:
    """All E before the pipeline's first action, all V behind its last."""
    return [
        [(0 if action.kind == "E" else len(actions), action) for action in _in_order(beside, rank)]
        for rank, actions in enumerate(schedule)
    ]


def in_time(
    schedule: Schedule, microbatches: int, placement: Placement, beside: Beside, early: int = 2, together: int = 1
) -> Places:
    """Each E shortly before the first stage's F that needs it, each V shortly behind its B: few bytes wait.

    The pipeline is played with a second for every action; E begin `early` seconds before that F, V as many behind that
    B, those of `together` microbatches at once: what ranks do at the same time holds the pipeline up once. Where the
    tower is ahead, E stand where the F of the same microbatch does.
    """
    ends = compile_schedule(schedule, microbatches, placement).by_second()
    (rank, chunk), places = placement.rank_and_chunk(0), []
    needed = [ends[rank, Action("F", m, chunk)] - 1 - early for m in range(microbatches)]
    given = [ends[rank, Action("B", m, chunk)] + early for m in range(microbatches)]
    firsts = [m - m % together for m in range(microbatches)]
    needed = [min(needed[first:]) for first in firsts]
    given = [max(given[: first + together]) for first in firsts]
    for mine, actions in enumerate(schedule):
        starts = [ends[mine, action] - 1 for action in actions]
        wanted = [
            (needed[action.microbatch] if action.kind == "E" else given[action.microbatch], action)
            for action in _in_order(beside, mine)
        ]
        places.append([(sum(start < second for start in starts), action) for second, action in wanted])
    return places


def _in_order(beside: Beside, rank: int) -> list[Action]:
    return sorted(beside.work(rank), key=lambda action: (action.kind, action.microbatch))
