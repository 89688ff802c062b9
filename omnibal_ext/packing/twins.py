"""Twins: samples so alike that packs of one serve for all. A large corpus is packed and ordered once for many of them.

tokens of samples of 2 tiles   611 611 612 | 613 615 615 | 615 616 620 | 620
packed                                 612           615           620            three times, each with other samples
"""

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.packers.balanced import MOST_CELLS, shuffled_by_type
from omnibal_ext.packing.packs import PackList, offsets_of

LONGER = 1e-4  # share of all tokens that packs may lose by holding room for the longest of twins


def twins_of(corpus: Corpus, samples: Ints, count: int, seed: int) -> tuple[Ints, Ints]:
    """Divide samples into sets of `count` with equal tiles and source and nearly equal tokens.

    1. Sort by tiles and source, then by tokens, equal ones at random.
    2. Cut the samples of each tiles and source into sets, from the longest on; the shortest few are not in any.

    Returns:
        Samples [count, n], the longest of each set first, which ascend; and the others. All samples are others where
        these differ in further sizes or groups, or where sets would take more than `LONGER` of the tokens.
    """
    sizes, nobody = corpus.sizes, np.zeros((count, 0), np.int64)
    if count < 2 or sizes.more or corpus.groups is not None:
        return nobody, samples
    kinds, tokens = sizes.tiles[samples] * np.int64(len(corpus.sources)), sizes.tokens[samples]
    kinds += corpus.source_numbers()[samples] if len(corpus.sources) > 1 else 0
    of_kind, columns = np.bincount(kinds), int(tokens.max()) + 1
    there = np.flatnonzero(of_kind)
    if len(there) * columns > MOST_CELLS:
        return nobody, samples
    row_of = np.zeros(len(of_kind), np.int64)
    row_of[there] = np.arange(len(there))
    types = row_of[kinds] * columns + tokens
    order = shuffled_by_type(types, offsets_of(np.bincount(types, minlength=len(there) * columns)), seed)
    in_set, of_row = np.ones(len(order), np.bool_), of_kind[there]
    for first, left in zip(offsets_of(of_row).tolist(), (of_row % count).tolist(), strict=False):
        in_set[first : first + left] = False
    rest, sets = samples[order[~in_set]], samples[order[in_set]].reshape(-1, count)
    longest = int(sizes.tokens[sets[:, -1]].sum()) * count
    if longest - int(tokens.sum() - sizes.tokens[rest].sum()) > LONGER * longest:
        return nobody, samples
    return np.ascontiguousarray(sets[np.argsort(sets[:, -1]), ::-1].T), rest


def distributed(packs: PackList, twins: Ints) -> list[PackList]:
    """Return `packs` of the samples `twins[0]` once more for each row of `twins` [count, n]."""
    places = np.searchsorted(twins[0], packs.sample_ids)
    return [PackList(packs.pack_offsets, row[places]) for row in twins]
