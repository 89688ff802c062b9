"""Wide packs that run at one time, filled with short samples until each takes as long as the others of its group.

seconds of long documents   5.0 4.8 4.7 4.6        room   0  .3  .3  .6
filled                      5.0 5.0 5.0 5.0        the dearest stays as it is, though budgets would hold more
"""

import heapq

import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.packers.isf import FILTER_TOKENS

LOOKED = 16  # at so many samples of a pool, for one that fits


class Pool:
    """Short samples in the order in which they are taken."""

    def __init__(self, samples: Ints, sizes: Ints, seconds: Floats) -> None:
        """Of each sample: its number [N], its sizes that have a budget [N, K], what it adds to a pack [N]."""
        self.samples, self.sizes, self.seconds = samples.copy(), sizes.copy(), seconds.copy()
        self.taken = 0

    def take(self, room: Ints, most: float) -> int:
        """Return the place of a sample that fits, and takes no more seconds, or -1; it is taken then."""
        for place in range(self.taken, min(self.taken + LOOKED, len(self.samples))):
            if self.seconds[place] <= most and (self.sizes[place] <= room).all():
                for values in (self.samples, self.sizes, self.seconds):
                    values[[self.taken, place]] = values[[place, self.taken]]
                self.taken += 1
                return self.taken - 1
        return -1

    @property
    def left(self) -> Ints:
        """Samples that are not taken."""
        return self.samples[self.taken :]


def fill_groups(seconds: Floats, room: Ints, pools: list[Pool], of: Ints, size: int) -> tuple[Ints, list[list[int]]]:
    """Group packs of one width by what they take, `size` to a group, and fill them level.

    Args:
        seconds: of each pack, [P]; P is a multiple of `size`.
        room: what is left of its budgets, [P, K], the second of tokens.
        pools: of which packs take samples.
        of: the pool of each pack, [P].

    Returns:
        Packs [groups, size], and the samples that each pack has got.
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
            place = pool.take(room[pack], most - so_far)
            if place >= 0:
                room[pack] -= pool.sizes[place]
                got[pack].append(int(pool.samples[place]))
                heapq.heappush(least, (so_far + float(pool.seconds[place]), pack))
    return rows, got
