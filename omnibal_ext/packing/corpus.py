"""A corpus: samples of one or more sources, how often each is seen, and which may not share a pack."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Ints
from omnibal_ext.errors import UserError
from omnibal_ext.files.folders import refuse_without_manifest
from omnibal_ext.large_arrays import is_mapped, rows_of
from omnibal_ext.reading.checks import finite, integer, listing, mapping, record, text
from omnibal_ext.reading.document import read_json, sealed_by
from omnibal_ext.sizes import Sizes, column_names

MOST_EPOCHS = 10  # packed separately because of fractional weights
DATASET_SOURCES = sealed_by(
    record(
        {"sources": listing(record({"file": text, "samples": integer()}, {"weight": finite()}))},
        {"checksums": mapping(text)},
    )
)
"""Schema of the fields that packing reads in a dataset's manifest."""


@dataclass(frozen=True, slots=True)
class CorpusSource:
    """One input of a corpus."""

    name: str
    samples: int
    weight: float = 1.0
    """How often each sample is in an epoch. 2: twice. 0.5: half of the samples, the others in the next epoch."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sizes of all samples, numbered from 0 through the sources in order."""

    sizes: Sizes
    sources: tuple[CorpusSource, ...]
    groups: Ints | None = None
    """[N]; samples of different groups never share a pack."""
    lines: Ints | None = None
    """[N]; line of each sample in its source, from 1. None: sample i of a source is its row i."""
    supervised: Ints | None = None
    """[N]; tokens of each sample that count in the loss; None: unknown."""
    kept: NDArray[np.bool_] | None = None
    """[N]; whether to pack each sample; the others are held out. None: all."""
    scratch: Path | None = None
    """Folder for what is too large for memory; None: the system's for temporary files."""

    def __post_init__(self) -> None:
        """Raise UserError if sizes, sources and groups differ in samples, or a weight is not above 0."""
        if sum(source.samples for source in self.sources) != len(self.sizes):
            raise UserError(f"sources have {sum(s.samples for s in self.sources)} samples, sizes {len(self.sizes)}")
        for source in self.sources:
            if not 0 < source.weight < np.inf:
                raise UserError(f"{source.name}: weight {source.weight} must be above 0")
        if self.groups is not None and self.groups.shape != (len(self.sizes),):
            raise UserError(f"groups have shape {self.groups.shape}, there are {len(self.sizes)} samples")

    @classmethod
    def load(cls, paths: Sequence[str | Path], more: Sequence[str] = ()) -> "Corpus":
        """Read sizes files, each a source of one corpus; `more` names further sizes. Large folders stay on disk."""
        files = [Sizes.load(path, more, on_disk=True) for path in paths]
        sources = (CorpusSource(str(path), len(sizes)) for path, sizes in zip(paths, files, strict=True))
        return cls(Sizes.concatenate(files), tuple(sources))

    @classmethod
    def of_dataset(cls, folder: str | Path, more: Sequence[str] = ()) -> "Corpus":
        """Read a dataset folder of `omnibal preprocess`: its input files are the sources.

        Raises:
            UserError: the folder is incomplete, or of another version.
        """
        refuse_without_manifest(Path(folder), "a dataset", "omnibal preprocess")
        manifest, sizes = Path(folder) / "manifest.json", Path(folder) / "sizes.npz"
        sources = read_json(manifest, DATASET_SOURCES, "preprocess again with omnibal preprocess")["sources"]
        about = [name for name in ("lines", "supervised") if name == "lines" or name in column_names(sizes)]
        loaded = Sizes.load(sizes, (*more, *about))
        return cls(
            Sizes(loaded.tiles, loaded.tokens, {name: loaded.more[name] for name in more}),
            tuple(CorpusSource(source["file"], source["samples"], source.get("weight", 1.0)) for source in sources),
            lines=loaded.more["lines"],
            supervised=loaded.more.get("supervised"),
        )

    @property
    def supervised_share(self) -> float | None:
        """Fraction of all tokens that count in the loss, at least 0.001; None: unknown."""
        if self.supervised is None:
            return None
        return max(float(self.supervised.sum()) / max(1, int(self.sizes.tokens.sum())), 1e-3)

    @classmethod
    def of(cls, sizes: Sizes) -> "Corpus":
        """Return a corpus of one unnamed source."""
        return cls(sizes, (CorpusSource("", len(sizes)),))

    def weighted(self, weights: Sequence[float]) -> "Corpus":
        """Return the corpus with these weights of its sources, in order. Raises UserError unless there is one each."""
        if len(weights) != len(self.sources):
            raise UserError(f"{len(weights)} weights for {len(self.sources)} inputs: give one each")
        sources = (replace(source, weight=weight) for source, weight in zip(self.sources, weights, strict=True))
        return replace(self, sources=tuple(sources))

    def grouped(self, values: Iterable[Any]) -> "Corpus":
        """Return the corpus with groups: samples whose `values` [N] differ as text never share a pack."""
        numbers: dict[str, int] = {}
        return replace(self, groups=np.array([numbers.setdefault(str(value), len(numbers)) for value in values]))

    def take(self, samples: Ints) -> "Corpus":
        """Return the corpus of these samples alone, ascending, in memory, numbered anew; without groups and lines."""
        ends = np.searchsorted(samples, np.cumsum([source.samples for source in self.sources]))
        counts = np.diff(ends, prepend=0).tolist()
        sources = tuple(replace(source, samples=n) for source, n in zip(self.sources, counts, strict=True))
        supervised = None if self.supervised is None else rows_of(self.supervised, samples)
        return Corpus(self.sizes.take(samples), sources, supervised=supervised)

    def in_memory(self) -> "Corpus":
        """Return the corpus with its sizes in memory, where they are files mapped from disk."""
        if not is_mapped(self.sizes.tokens):
            return self
        return replace(self, sizes=self.sizes.take(np.arange(len(self.sizes))))

    @property
    def is_plain(self) -> bool:
        """Whether all sources have weight 1, so that an epoch has every sample once."""
        return all(source.weight == 1.0 for source in self.sources)

    def source_numbers(self) -> Ints:
        """Return the number of each sample's source, [N]."""
        return np.repeat(np.arange(len(self.sources)), [source.samples for source in self.sources])

    def origin_of(self, sample: int) -> dict[str, Any]:
        """Return the file of a sample as a record, and its line there (from 1) or its row (from 0)."""
        first = 0
        for source in self.sources:
            if sample < first + source.samples:
                where = {"row": sample - first} if self.lines is None else {"line": int(self.lines[sample])}
                return {"file": source.name, **where}
            first += source.samples
        raise IndexError(sample)

    def epochs_to_see_all(self) -> int:
        """Return the fewest epochs in which each source is seen a whole number of times, at most `MOST_EPOCHS`."""
        for epochs in range(1, MOST_EPOCHS):
            if all(math.isclose(epochs * source.weight, round(epochs * source.weight)) for source in self.sources):
                return epochs
        return MOST_EPOCHS

    def epoch_samples(self, epoch: int, seed: int, packed: NDArray[np.bool_], most_sub_epochs: int) -> list[Ints]:
        """Return the numbers of the samples of each sub-epoch of an epoch, ascending; weights above 1 repeat some.

        1. Epoch e takes floor((e + 1) w n) - floor(e w n) of n samples of weight w, continuing a random order of the
           source's samples where epoch e - 1 stopped, cyclically.
        2. An epoch has as many sub-epochs as its largest weight, rounded up, `most_sub_epochs` at most. Samples go to
           them in turn: each has the same mix of sources, and no sample twice if there are enough sub-epochs.

        Args:
            packed: whether each sample may be taken, [N].
            most_sub_epochs: 1 or more.
        """
        sub_epochs = min(most_sub_epochs, max(math.ceil(source.weight) for source in self.sources))
        if sub_epochs == 1 and self.is_plain:
            return [np.flatnonzero(packed)]
        taken, first = [], 0
        for number, source in enumerate(self.sources):
            eligible = first + np.flatnonzero(packed[first : first + source.samples])
            weight = Fraction(source.weight).limit_denominator(1_000_000)
            start, end = (math.floor(turn * weight * len(eligible)) for turn in (epoch, epoch + 1))
            order = np.random.default_rng((seed, 2, number)).permutation(eligible)
            taken.append(order[np.sort(np.arange(start, end) % max(1, len(eligible)))])  # copies are adjacent
            first += source.samples
        samples = np.concatenate(taken)
        return [np.sort(samples[sub_epoch::sub_epochs]) for sub_epoch in range(sub_epochs)]
