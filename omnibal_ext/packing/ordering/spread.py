"""How much an iteration looks like the corpus: the second aim of packing, measured against random orders."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.packs import Packs

MOST_SOURCES = 8  # the largest ones; more are spread as well as chance does


@dataclass(frozen=True, slots=True)
class Features:
    """What an iteration should have as much of as the others."""

    names: tuple[str, ...]
    values: Floats
    """[P, F]"""
    sizes: int
    """The first so many features are sizes, the others shares of samples."""
    kinds: tuple[str, ...]
    """Kinds of sample that no iteration should miss: text-only ones, those with images, and each source."""
    has: NDArray[np.bool_]
    """[P, kinds]"""

    def deviations(self) -> Floats:
        """Return by how much packs differ in each feature, and in which kinds they have, [F + kinds]; 0: in nothing."""
        values = np.concatenate([self.values, self.has], axis=1)
        deviations = values.std(axis=0)
        return np.where(deviations > 1e-9 * np.maximum(1.0, np.abs(values).max(axis=0)), deviations, 0.0)

    def scaled(self, deviations: Floats) -> Floats:
        """Return what is to be mixed, with mean 0 and in `deviations`: the features, and which packs have a kind.

        What has no deviation is left out.
        """
        varies = deviations > 0
        values = np.concatenate([self.values, self.has], axis=1)[:, varies]
        return np.ascontiguousarray((values - values.mean(axis=0)) / deviations[varies])


def pack_features(corpus: Corpus, packs: Packs, loads: Ints, names: tuple[str, ...]) -> Features:
    """Return sizes, supervised tokens, text-only samples and sources of each pack; `loads` [P, K] are those of `names`.

    The feature of a source, and of text-only samples, is its samples beyond its share of the pack's samples.
    """
    starts, counts = packs.pack_offsets[:-1], packs.counts.astype(np.float64)

    def a_pack(values: NDArray[np.generic]) -> Floats:
        return np.add.reduceat(values[packs.sample_ids], starts, dtype=np.float64)

    columns = [loads.astype(np.float64)]
    labels, kinds, has = [*names], [], []
    if corpus.supervised is not None:
        labels.append("supervised")
        columns.append(a_pack(corpus.supervised)[:, None])
    text = a_pack(corpus.sizes.tiles == 0)
    sizes, samples = len(labels), counts.sum()
    if 0 < text.sum() < samples:
        labels.append("text-only")
        kinds += ["text-only", "with images"]
        columns.append((text - text.sum() / samples * counts)[:, None])
        has += [text > 0, text < counts]
    numbers = corpus.source_numbers()
    largest = np.argsort([-source.samples * source.weight for source in corpus.sources], kind="stable")[:MOST_SOURCES]
    sources = sorted(largest.tolist()) if len(corpus.sources) > 1 else []
    for source in sources:
        own = a_pack(numbers == source)
        labels.append(corpus.sources[source].name)
        kinds.append(corpus.sources[source].name)
        columns.append((own - own.sum() / samples * counts)[:, None])
        has.append(own > 0)
    return Features(
        tuple(labels),
        np.concatenate(columns, axis=1),
        sizes,
        tuple(kinds),
        np.stack(has, axis=1) if has else np.zeros((len(packs), 0), np.bool_),
    )


def random_spread(values: Floats, drawn: float, count: int) -> Floats:
    """Return the deviation of the sum over `drawn` of `count` things in random order, [F], whose `values` are [n, F].

    Of things that are drawn once each n have variance n (1 - (n - 1) / (N - 1)) times that of one.
    """
    return values.std(axis=0) * math.sqrt(max(0.0, drawn * (1 - (drawn - 1) / max(1, count - 1))))


def spread_of(iterations: Ints, values: Floats) -> Floats:
    """Return how sums over iterations [I, B] deviate from the mean, where packs have `values` [P, F]: [F]."""
    if len(iterations) < 2:
        return np.zeros(values.shape[1])
    found = values[iterations].sum(axis=1) - values.mean(axis=0) * iterations.shape[1]
    return np.sqrt((found**2).mean(axis=0))


def over(found: Floats, random: Floats) -> Floats:
    """Return how much something spreads, over what it spreads in a random order; 0 where that is 0 as well."""
    return np.where(random > 0, found / np.where(random > 0, random, 1.0), 0.0)


def spread_against_random(iterations: Ints, values: Floats) -> Floats:
    """Return how much the sums of iterations spread, over what they spread in a random order of the packs: [F].

    0: all are the same.

    Args:
        iterations: pack numbers, [I, B], no pack twice.
        values: of each pack, [P, F].
    """
    return over(spread_of(iterations, values), random_spread(values, iterations.shape[1], len(values)))


def missing_kinds(iterations: Ints, has: NDArray[np.bool_]) -> Floats:
    """Return the share of iterations [I, B] without a kind, [kinds]."""
    return (~has[iterations].any(axis=1)).mean(axis=0) if len(iterations) else np.zeros(has.shape[1])
