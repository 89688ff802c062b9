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

    Step time grows with every count, so of the counts that fit only the minimal ones can be best. (More recomputation
    may need more bytes: the layer that is run again comes on top where weight gradients keep it from falling away.)

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

    @property
    def listed(self) -> int:
        """How many ranks and counts of layers have been looked at."""
        return len(self._known)

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
        """The same row by row: with more ViT layers recomputed, only fewer LLM layers are of interest."""
        border: list[Ints] = []
        again, fewer = np.zeros_like(held), int(held[0, _LLM]) + 1
        for vit in range(int(held[0, _VIT]) + 1):
            again[0, _VIT] = vit
            for llm in range(fewer):
                again[0, _LLM] = llm
                if self.problem.stage_fits(rank, held[0], again[0]):
                    border.append(again.copy())
                    fewer = llm
                    break
        return border

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
