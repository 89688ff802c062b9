"""Packs of any width in the table of an iteration: [D, M] seats, a pack of width w on w neighbouring ranks of a column.

    width 4 | width 2 | 1 1 1       rank 0  A B c
                                    rank 1  A B d
                                    rank 2  A e -
                                    rank 3  A - -

All ranks run their seats in order, so teams meet in one order, and none waits for another for ever.
"""

import heapq
from typing import NamedTuple

import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.packs import Packs

EMPTY_SEAT = -1


class Seated(NamedTuple):
    """Packs, and the seats they take in iterations."""

    packs: Packs
    widths: Ints  # [P]
    seats: Ints  # [I, D, M] pack numbers, or EMPTY_SEAT


class Table:
    """One iteration while packs take their seats, the widest first."""

    def __init__(self, data_parallel_size: int, micro_batches: int, parts: int) -> None:
        self.seats = np.full((data_parallel_size, micro_batches), EMPTY_SEAT, np.int64)
        self.taken = np.zeros(data_parallel_size, np.int64)
        """Seats of each rank, the first ones of its row."""
        self.seconds = np.zeros((data_parallel_size, parts))
        """Of each rank in each part."""

    def seat(self, pack: int, width: int, seconds: Floats) -> bool:
        """Seat a pack, no wider than those before it, on the team with the least to do that has room; say if one has.

        As widths divide each other, the ranks of a team have taken equally many seats.
        """
        totals = self.seconds.sum(axis=1).reshape(-1, width).max(axis=1)
        full = self.taken[::width] == self.seats.shape[1]
        team = int(np.argmin(np.where(full, np.inf, totals)))
        if full[team]:
            return False
        ranks = slice(team * width, (team + 1) * width)
        self.seats[ranks, self.taken[team * width]] = pack
        self.taken[ranks] += 1
        self.seconds[ranks] += seconds
        return True


def deal_seats(packs: Ints, seconds: Floats, widths: Ints, data_parallel_size: int, micro_batches: int) -> Ints:
    """Seat packs of one iteration so that ranks are level, the widest first and of these the dearest: [D, M].

    Args:
        packs: their numbers; widths add up to no more than there are seats.
        seconds: of a rank that runs them, [packs, parts].
        widths: [packs].
    """
    table = Table(data_parallel_size, micro_batches, seconds.shape[1])
    for place in np.lexsort((packs, -seconds.sum(axis=1), -widths)):
        assert table.seat(int(packs[place]), int(widths[place]), seconds[place])
    return table.seats


def deal_tables(
    seconds: Floats, widths: Ints, iterations: int, data_parallel_size: int, micro_batches: int
) -> list[Table] | None:
    """Deal packs 0, 1, 2... over iterations: the widest and of these the dearest first, to that with least work so far.

    None if one finds no seat.
    """
    tables = [Table(data_parallel_size, micro_batches, seconds.shape[1]) for _ in range(iterations)]
    least = [(0.0, number) for number in range(iterations)]
    totals = seconds.sum(axis=1)
    for pack in np.lexsort((-totals, -widths)).tolist():
        full = []
        while least:
            work, number = heapq.heappop(least)
            if tables[number].seat(pack, int(widths[pack]), seconds[pack]):
                heapq.heappush(least, (work + float(totals[pack] * widths[pack]), number))
                break
            full.append((work, number))
        else:
            return None
        for each in full:
            heapq.heappush(least, each)
    return tables


def deal_all(packs: Ints, seconds: Floats, widths: Ints, data_parallel_size: int, micro_batches: int) -> Ints:
    """Return as few iterations as have seats for some packs, level as far as they go: [I, D, M]. Others as above."""
    iterations = -(-int(widths.sum()) // (data_parallel_size * micro_batches))
    tables = deal_tables(seconds, widths, iterations, data_parallel_size, micro_batches)
    assert tables is not None  # widths that divide each other leave no seat between them
    seats = np.stack([table.seats for table in tables])
    return np.where(seats >= 0, packs[seats], EMPTY_SEAT)
