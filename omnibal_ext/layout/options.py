"""Which recompute counts of a rank are worth looking at, exactly."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.chain import KINDS
from omnibal_ext.layout.problem import LayoutProblem

Ints = NDArray[np.int64]
_VIT, _LLM = KINDS.index("vit"), KINDS.index("llm")
LARGEST_GRID = 200_000


class RankOptions:
    """The minimal recompute counts with which a rank fits; what they leave out only costs time.

    Recomputing one layer more never makes a rank need more bytes: it gives back its saved bytes once for every
    microbatch in flight, and running it again takes them at most once. So the counts that fit are closed upwards, and
    as step time grows with every count only the minimal ones can be best:

    1. Lay out all counts of the rank's stages as a grid, one axis a stage and kind.
    2. Mark where the bytes fit.
    3. Keep the marked points whose neighbour one layer less, on every axis, is not marked.
    4. If all microbatches are equal and the rank has one stage, keep only the one that adds the least time.
    """

    def __init__(self, problem: LayoutProblem) -> None:
        self.problem = problem
        self.exact = True
        """False once a rank had too many counts to list and only some were looked at."""
        self._known: dict[tuple[int, bytes], list[Ints]] = {}
        tables = problem.tables
        self._again = tables.recompute.sum(axis=(1, 2))

    def of(self, rank: int, held: Ints) -> list[Ints]:
        """int64 [chunks, kinds] each, least time added first; none if the rank cannot fit. `held` likewise."""
        key = (rank, held.tobytes())
        if key not in self._known:
            found = self._minimal(rank, held)
            found.sort(key=lambda again: float((again @ self._again).sum()))
            level = self.problem.packs is None and self.problem.chunks == 1
            self._known[key] = found[:1] if level else found
        return self._known[key]

    def _minimal(self, rank: int, held: Ints) -> list[Ints]:
        if held.shape[0] == 1:
            return self._minimal_of_one_stage(rank, held)
        axes = [(chunk, kind) for chunk in range(held.shape[0]) for kind in (_VIT, _LLM) if held[chunk, kind]]
        nothing = np.zeros_like(held)
        if self.problem.rank_bytes(rank, held, nothing) <= self.problem.memory_bytes:
            return [nothing]
        shape = tuple(int(held[axis]) + 1 for axis in axes)
        if not axes or np.prod(shape) > LARGEST_GRID:
            self.exact &= not axes
            return list(self._first_of_greedy(rank, held, axes))
        counts = np.zeros((int(np.prod(shape)), *held.shape), dtype=np.int64)
        for (chunk, kind), index in zip(axes, np.indices(shape).reshape(len(axes), -1), strict=True):
            counts[:, chunk, kind] = index
        fits = (self.problem.bytes_of_counts(rank, held, counts) <= self.problem.memory_bytes).reshape(shape)
        minimal = fits.copy()
        for axis in range(len(axes)):
            less = np.roll(fits, 1, axis=axis)
            np.moveaxis(less, axis, 0)[0] = False
            minimal &= ~less
        return list(counts[minimal.ravel()])

    def _minimal_of_one_stage(self, rank: int, held: Ints) -> list[Ints]:
        """Steps 1 to 3 along the border of what fits: with more ViT layers recomputed, fewer LLM layers need be."""
        border: list[Ints] = []
        again = np.zeros_like(held)
        again[0, _VIT], again[0, _LLM] = held[0, _VIT], held[0, _LLM]
        if not self._fits(rank, held, again):
            return border
        again[0, _VIT] = 0
        for vit in range(int(held[0, _VIT]) + 1):
            again[0, _VIT] = vit
            if not self._fits(rank, held, again):
                continue
            while again[0, _LLM] > 0 and self._fits_with_one_less(rank, held, again):
                again[0, _LLM] -= 1
            border.append(again.copy())
            if again[0, _LLM] == 0:
                break
            again[0, _LLM] -= 1
        return border

    def _fits_with_one_less(self, rank: int, held: Ints, again: Ints) -> bool:
        fewer = again.copy()
        fewer[0, _LLM] -= 1
        return self._fits(rank, held, fewer)

    def _fits(self, rank: int, held: Ints, again: Ints) -> bool:
        return self.problem.stage_fits(rank, held[0], again[0])

    def _first_of_greedy(self, rank: int, held: Ints, axes: list[tuple[int, int]]) -> Iterator[Ints]:
        """Too many to list: add layers where they give back most bytes a second, until the rank fits."""
        tables, in_flight = self.problem.tables, self.problem.held[rank].max(axis=0)
        saved = tables.kept - tables.recompute_kept
        again = np.zeros_like(held)
        for axis in sorted(axes, key=lambda a: -in_flight[a[0]] * saved[a[1]] / max(self._again[a[1]], 1e-300)):
            for count in range(1, int(held[axis]) + 1):
                again[axis] = count
                if self.problem.rank_bytes(rank, held, again) <= self.problem.memory_bytes:
                    yield again.copy()
                    return
