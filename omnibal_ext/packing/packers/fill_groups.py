"""Fill the wide packs of an iteration with short samples until all take equally long.

seconds of long documents   5.0 4.8 4.7 4.6        room   0  .3  .3  .6
filled                      5.0 5.0 5.0 5.0        the costliest stays as it is, although budgets would hold more
"""

import heapq

import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.packers.isf import FILTER_TOKENS

LOOKED = 16  # samples tried per pool


class Pool:
    """Short samples that fill up wide packs, in the order in which they are taken."""

    def __init__(self, samples: Ints, sizes: Ints, seconds: Floats) -> None:
        """Copy number [N], sizes that have a budget [N, K] and seconds [N] of each sample."""
        self.samples, self.sizes, self.seconds = samples.copy(), sizes.copy(), seconds.copy()
        self.taken = 0

    def take(self, room: Ints, most: float) -> int:
        """Take one of the next samples that fits `room` [K] and `most` seconds; return its position, -1: none does."""
        for position in range(self.taken, min(self.taken + LOOKED, len(self.samples))):
            if self.seconds[position] <= most and (self.sizes[position] <= room).all():
                for values in (self.samples, self.sizes, self.seconds):
                    values[[self.taken, position]] = values[[position, self.taken]]
                self.taken += 1
                return self.taken - 1
        return -1

    @property
    def left(self) -> Ints:
        """Numbers of the samples not yet taken."""
        return self.samples[self.taken :]


def fill_groups(seconds: Floats, room: Ints, pools: list[Pool], of: Ints, size: int) -> tuple[Ints, list[list[int]]]:
    """Group packs of one width by cost, `size` to a group; fill each group's to equal seconds with short samples.

    Args:
        seconds: of each pack, [P]; P is a multiple of `size`.
        room: unused budgets of each pack, [P, K]; column 1 is tokens.
        pools: short samples, by exchange group.
        of: index of each pack's pool, [P].

    Returns:
        Packs [groups, size], and the samples that each pack received.
    """
    rows = np.argsort(-seconds, kind="stable").reshape(-1, size)
    got: list[list[int]] = [[] for _ in range(len(seconds))]
    tokens = sum(int(pool.sizes[:, 1].sum()) for pool in pools)
    each = sum(float(pool.seconds.sum()) for pool in pools) / max(1, tokens)
    room = room.copy()
    for row in rows:
        full = seconds[row] + each * np.maximum(room[row, 1] - FILTER_TOKENS, 0)
        most = max(float(seconds[row].max()), float(full.min()))
        least = [(float(seconds[pack]), int(pack)) for pack in row]
        heapq.heapify(least)
        while least:
            so_far, pack = heapq.heappop(least)
            pool = pools[of[pack]]
            position = pool.take(room[pack], most - so_far)
            if position >= 0:
                room[pack] -= pool.sizes[position]
                got[pack].append(int(pool.samples[position]))
                heapq.heappush(least, (so_far + float(pool.seconds[position]), pack))
    return rows, got
