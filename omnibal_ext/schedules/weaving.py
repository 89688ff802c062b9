"""Insertion of E and V of a replicated tower into the lists of the language model's stages.

`first_and_last`, the form of Kimi K2.5 (arXiv 2602.02276): all images before the pipeline, all backwards behind it.

    rank 0   E0 E1 | F0 F1    B0 B1    | V0 V1        `in_time`, or searched:  E0 F0 E1 F1    B0 V0 B1 V1
    rank 1   E0 E1 |    F0 B0 F1 B1    | V0 V1                             E0 E1 F0 B0 V0 F1 B1 V1

The insertion point of an E or V is the number of the rank's language actions before it. These keep their order, and the
E of a rank, and its V, go in the order of microbatches.
"""

from collections import deque

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.schedules.actions import OF_TOWER, Action, Beside, Schedule
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import compile_schedule

NONE = -1
"""Insertion point of an E or V that a rank does not run."""


def woven(schedule: Schedule, insertions: Ints) -> Schedule:
    """Insert E and V into the language model's lists: each behind as many actions of its rank as `insertions` says,
    int64 [2, ranks, microbatches] (`NONE`: not there); of one point E go first, in the order of microbatches."""
    lists: Schedule = []
    for rank, actions in enumerate(schedule):
        woven = sorted((insertions[of, rank, m], of, m) for of, m in np.argwhere(insertions[:, rank] != NONE).tolist())
        lists.append(list(actions))
        for point, of, m in reversed(woven):
            lists[rank].insert(point, Action(OF_TOWER[of], m, rank))
    return lists


def first_and_last(schedule: Schedule, beside: Beside) -> Ints:
    """Return insertion points that put all E before the pipeline's first action, all V behind its last."""
    ends = np.array([[len(actions)] for actions in schedule])
    return _at(beside, np.zeros_like(ends), ends)


def in_time(
    schedule: Schedule, microbatches: int, placement: Placement, beside: Beside, early: int = 2, together: int = 1
) -> Ints:
    """Return insertion points by which few bytes wait: E shortly before the first stage's F, V shortly behind its B.

    The pipeline is played with a second for every action; E begin `early` seconds before that F, V as many behind that
    B, those of `together` microbatches at once: what ranks do at the same time holds the pipeline up once. With
    `beside.ahead`, E stand where the F of the same microbatch does.
    """
    ends = compile_schedule(schedule, microbatches, placement).by_second()
    rank, chunk = placement.rank_and_chunk(0)
    needed = [ends[rank, Action("F", m, chunk)] - 1 - early for m in range(microbatches)]
    given = [ends[rank, Action("B", m, chunk)] + early for m in range(microbatches)]
    firsts = [m - m % together for m in range(microbatches)]
    needed = [min(needed[first:]) for first in firsts]
    given = [max(given[: first + together]) for first in firsts]
    starts = [[ends[mine, action] - 1 for action in actions] for mine, actions in enumerate(schedule)]
    before, behind = (np.stack([np.searchsorted(one, seconds) for one in starts]) for seconds in (needed, given))
    return _at(beside, before, behind)


def with_encoding(schedule: Schedule, beside: Beside) -> Schedule:
    """Add E and V to lists for evaluations, for which the plan has none: E at most as many microbatches before its F as
    there are ranks, so that few image tokens are held, and V at the end."""
    lists: Schedule = []
    for rank, actions in enumerate(schedule):
        mine = [microbatch for microbatch, ranks in enumerate(beside.encoding_ranks) if rank in ranks]
        left, found = deque(mine), list[Action]()
        for action in actions:
            while left and action.kind == "F" and left[0] <= action.microbatch + len(schedule):
                found.append(Action("E", left.popleft(), rank))
            found.append(action)
        lists.append(found + [Action("V", microbatch, rank) for microbatch in mine])
    return lists


def _at(beside: Beside, e: Ints, v: Ints) -> Ints:
    """Return `e` and `v`, [ranks, microbatches] or [ranks, 1], stacked as insertion points; `NONE` where a rank encodes
    nothing."""
    encodes = np.array([[rank in ranks for ranks in beside.encoding_ranks] for rank in range(len(e))])
    return np.stack([np.where(encodes, e, NONE), np.where(encodes & (not beside.ahead), v, NONE)])
