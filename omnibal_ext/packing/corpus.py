"""A corpus: samples of one or several sources, how often each is seen, and who must not share a pack."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.sizes import Sizes

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Source:
    """One input of a corpus."""

    name: str
    samples: int
    weight: float = 1.0
    """Times that each sample is seen in an epoch: 2 twice, 0.5 a random half of the samples."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sizes of all samples, numbered from 0 through the sources in order."""

    sizes: Sizes
    sources: tuple[Source, ...]
    groups: Ints | None = field(default=None)
    """[N]; samples of different groups never share a pack."""

    def __post_init__(self) -> None:
        """Raises UserError where the parts do not match."""
        if sum(source.samples for source in self.sources) != len(self.sizes):
            raise UserError(f"sources have {sum(s.samples for s in self.sources)} samples, sizes {len(self.sizes)}")
        for source in self.sources:
            if not 0 < source.weight < np.inf:
                raise UserError(f"{source.name}: weight {source.weight} must be above 0")
        if self.groups is not None and self.groups.shape != (len(self.sizes),):
            raise UserError(f"groups have shape {self.groups.shape}, there are {len(self.sizes)} samples")

    @classmethod
    def load(cls, paths: Sequence[str | Path], weights: Sequence[float] = (), separate: bool = False) -> "Corpus":
        """Read sizes files as the sources of one corpus; with `separate` no two sources share a pack."""
        if weights and len(weights) != len(paths):
            raise UserError(f"{len(weights)} weights for {len(paths)} inputs: give one each")
        parts = [Sizes.load(path) for path in paths]
        sources = tuple(
            Source(str(path), len(part), weight)
            for path, part, weight in zip(paths, parts, weights or [1.0] * len(parts), strict=True)
        )
        corpus = cls(Sizes.concatenate(parts), sources)
        return cls(corpus.sizes, sources, corpus.source_numbers()) if separate else corpus

    @classmethod
    def of(cls, sizes: Sizes) -> "Corpus":
        """Make a corpus of one nameless source."""
        return cls(sizes, (Source("", len(sizes)),))

    def source_numbers(self) -> Ints:
        """Return the source of each sample, [N]."""
        return np.repeat(np.arange(len(self.sources)), [source.samples for source in self.sources])

    def place(self, sample: int) -> dict[str, Any]:
        """Say which file a sample came from, and which row of it."""
        first = 0
        for source in self.sources:
            if sample < first + source.samples:
                return {"file": source.name, "row": sample - first}
            first += source.samples
        raise IndexError(sample)

    def epoch_samples(self, seed: int) -> Ints:
        """Return the samples of one epoch, each as often as its source's weight says; ascending."""
        if all(source.weight == 1.0 for source in self.sources):
            return np.arange(len(self.sizes), dtype=np.int64)
        generator = np.random.default_rng((seed, 2))
        parts, first = [], 0
        for source in self.sources:
            times, share = divmod(source.weight, 1.0)
            extra = generator.permutation(source.samples)[: round(share * source.samples)]
            own = np.concatenate([np.repeat(np.arange(source.samples), int(times)), extra])
            parts.append(np.sort(own) + first)
            first += source.samples
        return np.concatenate(parts).astype(np.int64)
