"""Which recompute counts of a rank are worth looking at."""

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Ints
from omnibal_ext.layout.frontier import minimal
from omnibal_ext.layout.problem import LayoutProblem


class RankOptions:
    """Recompute counts with which a rank fits.

    Step time grows with every count, so only the minimal counts that fit can be best (`frontier`). A rank with one
    stage gets all of them; if all microbatches are equal, the one that adds the least time. With virtual chunks there
    are too many, and trying more cuts gains more: a rank gets one choice, which is near the best:

    1. Add layers one by one, first where they give back most bytes a second, until the rank fits. A layer recomputed
       whole takes the place of one whose cheap outputs are.
    2. Take back what was added last as far as the rank fits without it.
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
            self._known[key] = self._of_one_stage(rank, held) if len(held) == 1 else self._of_many_stages(rank, held)
        return self._known[key]

    def _of_one_stage(self, rank: int, held: Ints) -> list[Ints]:
        problem = self.problem
        counts = minimal(problem.stage_bytes[rank], held[0], self._seconds, problem.tables.offered)
        found = sorted((again[None] for again in counts), key=lambda again: float((again @ self._seconds).sum()))
        return found[:1] if problem.packs is None else found

    def _of_many_stages(self, rank: int, held: Ints) -> list[Ints]:
        added = self._added(rank, held)
        fitting = self._fits(rank, held, np.stack(added))
        if not fitting.any():
            return []
        again = added[int(fitting.argmax())]
        for chunk, way in reversed(self._axes(rank, held)):
            less = np.repeat(again[None], again[chunk, way] + 1, axis=0)
            less[:, chunk, way] = np.arange(again[chunk, way], -1, -1)
            again = less[int(self._fits(rank, held, less).cumprod().sum()) - 1]
        return [again]

    def _added(self, rank: int, held: Ints) -> list[Ints]:
        """Nothing, then a layer more each time."""
        again = np.zeros((len(held), len(self.problem.kind_of_way)), dtype=np.int64)
        added = [again.copy()]
        kinds, whole = self.problem.kind_of_way, self.problem.whole
        for chunk, way in self._axes(rank, held):
            layers = held[chunk, kinds[way]]
            (other,) = np.flatnonzero((kinds[way] == kinds) & (whole[way] != whole))
            most = layers if whole[way] else layers - again[chunk, other]
            for count in range(1, int(most) + 1):
                again[chunk, way] = count
                again[chunk, other] = min(again[chunk, other], layers - count)
                added.append(again.copy())
        return added

    def _axes(self, rank: int, held: Ints) -> list[tuple[int, int]]:
        """(chunk, way) of what can be recomputed, that first which gives back most bytes a second."""
        tables, in_flight = self.problem.tables, self.problem.held[rank].max(axis=0)
        gains = in_flight[:, None] * tables.saved / np.maximum(self._seconds, 1e-300)
        axes = np.argwhere(held[:, self.problem.kind_of_way] * tables.offered).tolist()
        return sorted(((chunk, way) for chunk, way in axes), key=lambda axis: -float(gains[axis]))

    def _fits(self, rank: int, held: Ints, counts: Ints) -> NDArray[np.bool_]:
        """Of counts [many, chunks, ways]: bool [many]."""
        return np.asarray(self.problem.bytes_of_counts(rank, held, counts) <= self.problem.memory_bytes)
