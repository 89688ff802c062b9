"""How much iterations differ from the corpus, relative to iterations of random order."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.packs import PackList

MOST_SOURCES = 8  # the largest ones; smaller ones are ignored


@dataclass(frozen=True, slots=True)
class Features:
    """Features of packs whose sums should be equal over iterations."""

    values: Floats
    """Values [P, F] of packs."""
    sizes: int
    """Number of features that are sizes (the first ones); the others count text-only samples and sources."""
    names: list[str]  # of the features after the loads of packs
    has: NDArray[np.bool_]
    """[P, kinds]; whether a pack has a sample of a kind that every iteration should have: text-only, with images, each
    source."""

    def deviations(self) -> Floats:
        """Return the standard deviation over packs of each feature and kind, [F + kinds]; 0: all are equal."""
        values = np.concatenate([self.values, self.has], axis=1)
        deviations = values.std(axis=0)
        return np.where(deviations > 1e-9 * np.maximum(1.0, np.abs(values).max(axis=0)), deviations, 0.0)

    def scaled(self, deviations: Floats) -> Floats:
        """Return features and kinds, centred, divided by `deviations`, without those of deviation 0: [P, columns]."""
        varies = deviations > 0
        values = np.concatenate([self.values, self.has], axis=1)[:, varies]
        return np.ascontiguousarray((values - values.mean(axis=0)) / deviations[varies])


def pack_features(corpus: Corpus, packs: PackList, loads: Ints) -> Features:
    """Return the features of packs: sizes, supervised tokens, text-only samples and sources.

    The feature of a source, or of text-only samples, is their number in the pack minus that expected from their
    fraction of all samples.

    Args:
        loads: of packs, [P, K].
    """
    starts, counts = packs.pack_offsets[:-1], packs.counts.astype(np.float64)

    def a_pack(values: NDArray[np.generic]) -> Floats:
        return np.add.reduceat(values[packs.sample_ids], starts, dtype=np.float64)

    columns, names = [loads.astype(np.float64)], list[str]()
    if corpus.supervised is not None:
        columns.append(a_pack(corpus.supervised)[:, None])
        names.append("supervised tokens")
    text, has = a_pack(corpus.sizes.tiles == 0), []
    sizes, samples = sum(column.shape[1] for column in columns), counts.sum()
    if 0 < text.sum() < samples:
        columns.append((text - text.sum() / samples * counts)[:, None])
        has += [text > 0, text < counts]
        names.append("text-only samples")
    numbers = corpus.source_numbers()
    largest = np.argsort([-source.samples * source.weight for source in corpus.sources], kind="stable")[:MOST_SOURCES]
    sources = sorted(largest.tolist()) if len(corpus.sources) > 1 else []
    for source in sources:
        of_source = a_pack(numbers == source)
        columns.append((of_source - of_source.sum() / samples * counts)[:, None])
        has.append(of_source > 0)
        names.append(corpus.sources[source].name)
    held = np.stack(has, axis=1) if has else np.zeros((len(packs), 0), np.bool_)
    return Features(np.concatenate(columns, axis=1), sizes, names, held)


def random_spread(values: Floats, drawn: float, count: int) -> Floats:
    """Return the standard deviation of the sum of `drawn` of `count` items in random order, [F]; `values` are [n, F].

    A sum of n draws without replacement from N has n (1 - (n - 1) / (N - 1)) times the variance of one draw.
    """
    return values.std(axis=0) * math.sqrt(max(0.0, drawn * (1 - (drawn - 1) / max(1, count - 1))))


def iteration_spread(iterations: Ints, values: Floats) -> Floats:
    """Return the root mean square over iterations [I, B] of their sums of `values` [P, F] minus B mean packs: [F]."""
    if len(iterations) < 2:
        return np.zeros(values.shape[1])
    found = values[iterations].sum(axis=1) - values.mean(axis=0) * iterations.shape[1]
    return np.sqrt((found**2).mean(axis=0))


def relative_to(found: Floats, random: Floats) -> Floats:
    """Return `found` / `random`; 0 where `random` is 0."""
    return np.where(random > 0, found / np.where(random > 0, random, 1.0), 0.0)


def missing_kinds(iterations: Ints, has: NDArray[np.bool_]) -> Floats:
    """Return the fraction of iterations [I, B] without any sample of a kind, [kinds]; `has` [P, kinds] of packs."""
    return (~has[iterations].any(axis=1)).mean(axis=0) if len(iterations) else np.zeros(has.shape[1])
