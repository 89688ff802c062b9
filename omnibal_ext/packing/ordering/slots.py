"""Packs of any width in an iteration's table of [D, M] slots; width w takes one column's slots of w neighbouring ranks.

    width 4 | width 2 | 1 1 1       rank 0  A B c
                                    rank 1  A B d
                                    rank 2  A e -
                                    rank 3  A - -

A slot is one microbatch position of one data-parallel rank. All ranks run their slots in order, so their teams meet in
the same order and cannot deadlock.
"""

import heapq
from typing import NamedTuple

import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.packs import EMPTY_PACK, PackList


class SlottedPacks(NamedTuple):
    """Packs and the slots they occupy."""

    packs: PackList
    widths: Ints  # [P]
    slots: Ints  # [I, D, M] pack number, or EMPTY_PACK


class IterationSlots:
    """The slots [D, M] of one iteration while packs are added, widest first."""

    def __init__(self, data_parallel_size: int, micro_batches: int, parts: int) -> None:
        self.slots = np.full((data_parallel_size, micro_batches), EMPTY_PACK, np.int64)
        self.taken = np.zeros(data_parallel_size, np.int64)  # slots in use of each rank, from the first on
        self.seconds = np.zeros((data_parallel_size, parts))

    def add(self, pack: int, width: int, seconds: Floats) -> bool:
        """Add a pack, no wider than those before, to the least loaded team with a free slot; False: none has.

        Widths divide each other, so the ranks of a team always have equally many slots in use.
        """
        totals = self.seconds.sum(axis=1).reshape(-1, width).max(axis=1)
        full = self.taken[::width] == self.slots.shape[1]
        team = int(np.argmin(np.where(full, np.inf, totals)))
        if full[team]:
            return False
        ranks = slice(team * width, (team + 1) * width)
        self.slots[ranks, self.taken[team * width]] = pack
        self.taken[ranks] += 1
        self.seconds[ranks] += seconds
        return True


def fill_slots(packs: Ints, seconds: Floats, widths: Ints, data_parallel_size: int, micro_batches: int) -> Ints:
    """Assign the packs of one iteration so that ranks are balanced, widest first, then costliest: [D, M].

    Args:
        packs: their numbers; the sum of widths must not exceed the slots.
        seconds: of each rank that runs them, [packs, parts].
        widths: [packs].
    """
    table = IterationSlots(data_parallel_size, micro_batches, seconds.shape[1])
    for position in np.lexsort((packs, -seconds.sum(axis=1), -widths)):
        assert table.add(int(packs[position]), int(widths[position]), seconds[position])
    return table.slots


def fill_iterations(
    seconds: Floats, widths: Ints, iterations: int, data_parallel_size: int, micro_batches: int
) -> list[IterationSlots] | None:
    """Assign packs 0, 1, 2... to iterations, widest first, then costliest, each to the least loaded iteration.

    Returns:
        Tables of the iterations; None if a pack finds no slot.
    """
    tables = [IterationSlots(data_parallel_size, micro_batches, seconds.shape[1]) for _ in range(iterations)]
    least = [(0.0, number) for number in range(iterations)]
    totals = seconds.sum(axis=1)
    for pack in np.lexsort((-totals, -widths)).tolist():
        full = []
        while least:
            work, number = heapq.heappop(least)
            if tables[number].add(pack, int(widths[pack]), seconds[pack]):
                heapq.heappush(least, (work + float(totals[pack] * widths[pack]), number))
                break
            full.append((work, number))
        else:
            return None
        for each in full:
            heapq.heappush(least, each)
    return tables


def fill_fewest_iterations(
    packs: Ints, seconds: Floats, widths: Ints, data_parallel_size: int, micro_batches: int
) -> Ints:
    """Assign packs to as few iterations as have the slots: numbers [I, D, M]; arguments as of `fill_slots`."""
    iterations = -(-int(widths.sum()) // (data_parallel_size * micro_batches))
    tables = fill_iterations(seconds, widths, iterations, data_parallel_size, micro_batches)
    assert tables is not None  # widths that divide each other leave no gap between them
    slots = np.stack([table.slots for table in tables])
    return np.where(slots >= 0, packs[slots], EMPTY_PACK)
