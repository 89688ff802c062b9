"""Which recompute counts of a rank are worth looking at, exactly."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.layout.frontier import minimal
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.tables import KIND_OF_WAY, WAYS, WHOLE

Ints = NDArray[np.int64]
Axis = tuple[int, int]
"""A chunk and a way."""
LARGEST_GRID = 200_000


class RankOptions:
    """The minimal recompute counts with which a rank fits; what they leave out only costs time.

    Step time grows with every count, so of the counts that fit only the minimal ones can be best. (More recomputation
    may need more bytes: the layer that is run again comes on top where weight gradients keep it from falling away.)

    1. Lay out all counts of the rank's stages as a grid, one axis a stage and way.
    2. Mark where the bytes fit.
    3. Keep the marked points whose neighbour one layer less, on every axis, is not marked; of these, those that take
       least time in some kind of layer of some stage.
    4. If all microbatches are equal and the rank has one stage, keep only the one that adds the least time.
    """

    def __init__(self, problem: LayoutProblem) -> None:
        self.problem = problem
        self._known: dict[tuple[int, bytes], list[Ints]] = {}
        self._seconds = problem.tables.recompute.sum(axis=(1, 2))

    @property
    def listed(self) -> int:
        """How many ranks and counts of layers have been looked at."""
        return len(self._known)

    def of(self, rank: int, held: Ints) -> list[Ints]:
        """int64 [chunks, ways] each, least time added first; none if the rank cannot fit. `held` [chunks, columns]."""
        key = (rank, held.tobytes())
        if key not in self._known:
            found = self._minimal(rank, held)
            found.sort(key=lambda again: float((again @ self._seconds).sum()))
            level = self.problem.packs is None and self.problem.chunks == 1
            self._known[key] = found[:1] if level else found
        return self._known[key]

    def _minimal(self, rank: int, held: Ints) -> list[Ints]:
        problem, nothing = self.problem, np.zeros((len(held), len(WAYS)), dtype=np.int64)
        if len(held) == 1:
            counts = minimal(problem.stage_bytes[rank], held[0], self._seconds, problem.tables.offered)
            return [again[None] for again in counts]
        if problem.rank_bytes(rank, held, nothing) <= problem.memory_bytes:
            return [nothing]
        layers = held[:, KIND_OF_WAY] * problem.tables.offered
        axes = list(zip(*(places.tolist() for places in np.nonzero(layers)), strict=True))
        shape = tuple(int(layers[axis]) + 1 for axis in axes)
        if not axes or np.prod(shape) > LARGEST_GRID:
            return [] if not axes else list(self._first_of_greedy(rank, held, axes))
        counts = np.zeros((int(np.prod(shape)), *nothing.shape), dtype=np.int64)
        for (chunk, way), index in zip(axes, np.indices(shape).reshape(len(axes), -1), strict=True):
            counts[:, chunk, way] = index
        there = (counts[..., WHOLE] + counts[..., ~WHOLE] <= held[:, KIND_OF_WAY[WHOLE]]).all(axis=(1, 2))
        marked = (there & (problem.bytes_of_counts(rank, held, counts) <= problem.memory_bytes)).reshape(shape)
        keep = marked.copy()
        for axis in range(len(axes)):
            less = np.roll(marked, 1, axis=axis)
            np.moveaxis(less, axis, 0)[0] = False
            keep &= ~less
        return list(self._undominated(counts[keep.ravel()]))

    def _undominated(self, counts: Ints) -> Ints:
        """Those than which none takes less time in one kind of a stage and no more in any; of equals the first."""
        taken = counts * self._seconds
        taken = np.concatenate([*(taken[..., WHOLE] + taken[..., ~WHOLE]).swapaxes(0, 1)], axis=-1)
        keep: list[int] = []
        for one in np.lexsort(taken.T[::-1]).tolist():  # none is dominated by one that comes behind it
            if not (taken[keep] <= taken[one]).all(axis=1).any():
                keep.append(one)
        return counts[sorted(keep)]

    def _first_of_greedy(self, rank: int, held: Ints, axes: list[Axis]) -> Iterator[Ints]:
        """Too many to list: add layers where they give back most bytes a second, until the rank fits.

        A layer recomputed whole takes the place of one whose cheap outputs are.
        """
        problem, saved, in_flight = self.problem, self.problem.tables.saved, self.problem.held[rank].max(axis=0)
        again = np.zeros((len(held), len(WAYS)), dtype=np.int64)
        axes = sorted(axes, key=lambda a: -in_flight[a[0]] * saved[a[1]] / max(self._seconds[a[1]], 1e-300))
        for chunk, way in axes:
            layers = held[chunk, KIND_OF_WAY[way]]
            others = np.flatnonzero((KIND_OF_WAY[way] == KIND_OF_WAY) & (np.arange(len(WAYS)) != way))
            for count in range(1, int(layers) + 1):
                if again[chunk, others].sum() + count > layers and not WHOLE[way]:
                    break
                again[chunk, way] = count
                again[chunk, others] = np.minimum(again[chunk, others], layers - count)
                if problem.rank_bytes(rank, held, again) <= problem.memory_bytes:
                    yield self._without_the_needless(rank, held, again, axes)
                    return

    def _without_the_needless(self, rank: int, held: Ints, again: Ints, axes: list[Axis]) -> Ints:
        """Take back what was added last as far as the rank fits without it."""
        for axis in reversed(axes):
            while again[axis]:
                again[axis] -= 1
                if self.problem.rank_bytes(rank, held, again) > self.problem.memory_bytes:
                    again[axis] += 1
                    break
        return again
