"""Which rank encodes which images of a microbatch, where the vision tower stands beside the pipeline.

A unit is what attention of the ViT does not look beyond: a tile, or an image at native resolution with all its steps in
time. Its cost is its tiles, or patches. Who encodes it is a function of the pack, the microbatch and the plan alone:
ranks exchange nothing, and resuming is a position.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

from omnibal_ext.schedules.actions import Action, Beside, Schedule


def deal(units: Sequence[int], microbatch: int, ranks: tuple[int, ...], tensor_ranks: int) -> tuple[int, ...]:
    """Of every unit, by its cost, the worker: an index into `ranks` x `tensor_ranks`, tensor ranks vary fastest.

    The costliest unit goes to the least loaded worker (LPT, Graham 1969), ties by number, from another worker on for
    every microbatch: leftovers do not always fall on the same. Units of one cost change places so that neighbours stay
    together: an image's tiles are decoded by few.
    """
    workers = len(ranks) * tensor_ranks
    first = microbatch * _step(workers) % workers
    lightest = [(0, turn) for turn in range(workers)]
    turns = [0] * len(units)
    for _, alike in groupby(sorted(range(len(units)), key=lambda unit: (-units[unit], unit)), units.__getitem__):
        same, taken = list(alike), []
        for unit in same:
            load, turn = lightest[0]
            heapq.heapreplace(lightest, (load + units[unit], turn))
            taken.append(turn)
        for unit, turn in zip(same, sorted(taken), strict=True):
            turns[unit] = turn
    return tuple((first + turn) % workers for turn in turns)


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
        return [worker == own for worker in deal(units, microbatch, ranks, self.tensor_ranks)]


def parts_of(parts: tuple[tuple[int, ...], ...], microbatch: int) -> tuple[int, ...]:
    """The pipeline ranks that encode a microbatch; where there are more than the plan has, they begin anew."""
    return parts[microbatch % len(parts)]


def _step(workers: int) -> int:
    """From one microbatch's first worker to the next one's: near the golden ratio, and in time at every worker."""
    return min(
        (step for step in range(1, workers + 1) if gcd(step, workers) == 1), key=lambda n: abs(n - 0.618 * workers)
    )


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
