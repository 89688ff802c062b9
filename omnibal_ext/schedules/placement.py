"""Placement of stages: on which pipeline rank each is, in the order the data flows. A rank's stages are its chunks.

    chain                 stage 0 -> stage 1 -> stage 2 -> stage 3      two ranks, two chunks
    interleaved, on rank        0          1          0          1
    V-shaped, on rank           1          0          0          1      stage 1 hands over to stage 2 within rank 0

The last stage is on the last rank, always: from there Megatron reports the loss. So a V has its two ends on the last
rank, with an even number of chunks; with an odd one the chain begins on rank 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Placement:
    """A map from stages to ranks that gives every rank equally many."""

    ranks_of: tuple[int, ...]
    """Pipeline rank of every stage."""

    @classmethod
    def interleaved(cls, ranks: int, chunks: int = 1) -> "Placement":
        """Put stage s on rank s % ranks."""
        return cls(tuple(range(ranks)) * chunks)

    @classmethod
    def v_shaped(cls, ranks: int, chunks: int = 2) -> "Placement":
        """Put stages up and down the ranks: those on both sides of a turn are on one rank (Qi et al. 2024, V-shape)."""
        ways = (tuple(range(ranks)), tuple(reversed(range(ranks))))
        return cls(sum((ways[(chunks - 1 - way) % 2] for way in range(chunks)), ()))

    @cached_property
    def ranks(self) -> int:
        """Number of pipeline ranks."""
        return 1 + max(self.ranks_of)

    @property
    def stages(self) -> int:
        """Number of stages on all ranks."""
        return len(self.ranks_of)

    @property
    def chunks(self) -> int:
        """Number of stages on each rank."""
        return self.stages // self.ranks

    @cached_property
    def stages_of(self) -> tuple[list[int], ...]:
        """Stages of every rank in the order the data flows: its chunks 0, 1, ..."""
        return tuple([s for s, rank in enumerate(self.ranks_of) if rank == own] for own in range(self.ranks))

    @cached_property
    def _chunks_of(self) -> list[int]:
        return [self.stages_of[rank].index(stage) for stage, rank in enumerate(self.ranks_of)]

    def rank_and_chunk(self, stage: int) -> tuple[int, int]:
        """Return the pipeline rank of a stage, and which chunk of that rank it is."""
        return self.ranks_of[stage], self._chunks_of[stage]

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs (source, target) of ranks between which activations travel, each once; gradients go back."""
        pairs = zip(self.ranks_of, self.ranks_of[1:], strict=False)
        return tuple(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))

    def by_rank(self, values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum values over each rank's stages: [stages, ...] -> float64 [ranks, ...]."""
        of_stages = np.asarray(values, dtype=np.float64)
        found = np.zeros((self.ranks, *of_stages.shape[1:]))
        np.add.at(found, list(self.ranks_of), of_stages)
        return found
