"""Twins: samples so alike that packs of one serve for all. A large corpus is packed and ordered once for many of them.

tokens of samples of 2 tiles   611 611 612 | 613 615 615 | 615 616 620 | 620
packed                                 612           615           620            three times, each with other samples

Sizes are read twice: to count samples by type, which gives the sets of twins and the packs of their longest; and to put
each sample with those of its copy, on disk. Copy by copy, they then take the places of the longest.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Ints
from omnibal_ext.errors import UserError
from omnibal_ext.large_arrays import pieces, release, scratch
from omnibal_ext.modalities.modality import LANGUAGE, VISION, Budgets
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.packers.balanced import MOST_CELLS
from omnibal_ext.packing.packs import LoadedPacks, PackList, offsets_of, pack_loads
from omnibal_ext.packing.random_bits import below
from omnibal_ext.sizes import Sizes

LONGER = 1e-4  # share of all tokens that packs may lose by holding room for the longest of twins
NUMBER_BITS = 38  # of a sample's number, below its type
CHANGED = "the sizes have changed while they were packed; leave their files alone, and pack again"


class Types(NamedTuple):
    """How many samples are of each type. Row r is a source and tiles, column t tokens: type r x columns + t."""

    kinds: Ints  # [R] ascending: source x (most tiles + 1) + tiles
    most_tiles: int
    counts: Ints  # [R, columns] samples
    supervised: Ints  # [R, columns] sum of their supervised tokens

    def totals(self) -> dict[str, int]:
        """Return the tiles and the tokens of all samples together, by name of size."""
        tokens = self.counts.sum(axis=0) @ np.arange(self.counts.shape[1])
        return {VISION.size: int(self.counts.sum(axis=1) @ self.tiles()), LANGUAGE.size: int(tokens)}

    def tiles(self) -> Ints:
        """Return the tiles of a sample of each row, [R]."""
        return self.kinds % (self.most_tiles + 1)

    def in_pieces(self, corpus: Corpus, packed: NDArray[np.bool_]) -> Iterator[tuple[Ints, Ints]]:
        """Yield numbers and types of `packed` samples, some at a time. Raises UserError for types not counted."""
        row_of = np.zeros(int(self.kinds[-1]) + 1, np.int64)
        row_of[self.kinds] = np.arange(len(self.kinds))
        for numbers, kinds in _kinds_in_pieces(corpus, packed, self.most_tiles):
            tokens = corpus.sizes.tokens[numbers]
            if kinds.max(initial=0) >= len(row_of) or tokens.max(initial=0) >= self.counts.shape[1]:
                raise UserError(CHANGED)
            yield numbers, row_of[kinds] * self.counts.shape[1] + tokens


def _kinds_in_pieces(corpus: Corpus, packed: NDArray[np.bool_], most_tiles: int) -> Iterator[tuple[Ints, Ints]]:
    ends = np.cumsum([source.samples for source in corpus.sources])
    for piece in pieces(len(packed)):
        numbers = piece.start + np.flatnonzero(packed[piece])
        sources = np.searchsorted(ends, numbers, side="right")
        yield numbers, sources * (most_tiles + 1) + corpus.sizes.tiles[numbers]
        release(corpus.sizes.tiles, corpus.sizes.tokens)


def count_types(corpus: Corpus, packed: NDArray[np.bool_], budgets: Budgets) -> Types | None:
    """Count the samples with `packed` [N], which fit the budgets, by type; return None if types are too many, or
    samples have further sizes or groups."""
    most_tiles, most_tokens = (min(corpus.sizes.most(size), budgets[size]) for size in (VISION.size, LANGUAGE.size))
    columns = most_tokens + 1
    most_kinds = len(corpus.sources) * (most_tiles + 1)
    if corpus.sizes.more or corpus.groups is not None or most_kinds > MOST_CELLS:
        return None
    of_kind = np.zeros(most_kinds, np.int64)
    for _, kinds in _kinds_in_pieces(corpus, packed, most_tiles):
        of_kind += np.bincount(kinds, minlength=most_kinds)
    kinds = np.flatnonzero(of_kind)
    if not 0 < len(kinds) * columns <= MOST_CELLS:
        return None
    types = Types(kinds, most_tiles, *np.zeros((2, len(kinds), columns), np.int64))
    for numbers, each in types.in_pieces(corpus, packed):
        np.add.at(types.counts.reshape(-1), each, 1)
        if corpus.supervised is not None:
            np.add.at(types.supervised.reshape(-1), each, corpus.supervised[numbers])
    return types


class Twins:
    """Sets of `count` samples with equal tiles and source and nearly equal tokens; a copy has one of each set.

    Each row of types is cut into sets from its longest sample on; its shortest few are in none.
    """

    def __init__(self, corpus: Corpus, packed: NDArray[np.bool_], types: Types, count: int, seed: int) -> None:
        self.count = count
        self._corpus, self._packed, self._types, self._seed = corpus, packed, types, seed
        of_row, ends, columns = types.counts.sum(axis=1), np.cumsum(types.counts), types.counts.shape[1]
        self._firsts = offsets_of(of_row)[:-1] + of_row % count  # rank by type of each row's first that is in a set
        self._sets = offsets_of(of_row // count)  # of earlier rows
        rows = np.repeat(np.arange(len(of_row)), of_row // count)
        ranks = self._firsts[rows] + (np.arange(len(rows)) - self._sets[rows] + 1) * count - 1
        longest = np.searchsorted(ends, ranks, side="right")
        of_source = np.bincount(types.kinds[rows] // (types.most_tiles + 1), minlength=len(corpus.sources)).tolist()
        sources = (CorpusSource(one.name, n) for one, n in zip(corpus.sources, of_source, strict=True))
        means = (types.supervised.ravel()[longest] / types.counts.ravel()[longest]).round().astype(np.int64)
        supervised = None if corpus.supervised is None else means
        self.head = Corpus(self._sizes_of(longest), tuple(sources), supervised=supervised)
        """The longest of each set, with the mean supervised tokens of its type."""
        left = np.concatenate(
            [np.arange(first - n, first) for first, n in zip(self._firsts, of_row % count, strict=True)]
        )
        tokens = types.totals()[LANGUAGE.size] - int((np.searchsorted(ends, left, side="right") % columns).sum())
        room = int(self.head.sizes.tokens.sum()) * count
        self.are_alike = len(rows) > 0 and room - tokens <= LONGER * room
        """Whether packs of the longest lose little."""

    def _sizes_of(self, types: Ints) -> Sizes:
        rows, tokens = np.divmod(types, self._types.counts.shape[1])
        return Sizes(self._types.tiles()[rows].astype(np.int32), tokens)

    def deal(self, packs: PackList) -> Ints:
        """Assign samples to copies, on disk, for the sets in `packs` of the head; return all others, ascending."""
        counts, kept = self._types.counts.ravel(), np.zeros(len(self.head.sizes), np.bool_)
        kept[packs.sample_ids] = True
        self._packs = PackList(packs.pack_offsets, (np.cumsum(kept) - 1)[packs.sample_ids])
        self._held = scratch((self.count, int(np.count_nonzero(kept))), np.int64, self._corpus.scratch)
        held, filled, ends = np.asarray(self._held), np.zeros(self.count, np.int64), np.cumsum(counts)
        next_ranks = ends - counts
        common, left = (ends, self._types.counts.shape[1], next_ranks, self._firsts, self._sets, kept), []
        for numbers, types in self._types.in_pieces(self._corpus, self._packed):
            left.append(numbers[_deal(numbers, types, *common, self._seed, filled, held)])
            release(self._held)
        if (next_ranks != ends).any():
            raise UserError(CHANGED)
        return np.concatenate(left)

    def copy(self, number: int) -> LoadedPacks:
        """Return the packs that `deal` was given, each place of a longest taken by this copy's sample of the set."""
        held = np.sort(self._held[number])  # by type, so by set
        release(self._held)
        packs, numbers = self._packs, held & ((1 << NUMBER_BITS) - 1)
        loads = pack_loads(packs, self._sizes_of(held >> NUMBER_BITS))
        return LoadedPacks(PackList(packs.pack_offsets, numbers[packs.sample_ids]), loads)


@numba.njit(cache=True)
def _deal(
    numbers: Ints,
    types: Ints,
    ends: Ints,
    columns: int,
    next_ranks: Ints,
    firsts: Ints,
    sets: Ints,
    kept: NDArray[np.bool_],
    seed: int,
    filled: Ints,
    held: Ints,
) -> NDArray[np.bool_]:
    """Append samples to the copies that have them, in `held`; return which are in none, [n].

    The samples of a set go to the copies in turn, from a random one on.

    Args:
        ends: of each type, the number of samples up to it. There are no more, unless files have changed meanwhile.
        next_ranks: of the next sample of each type, among all by type; counted on.
        filled: samples that each copy has; counted on.
        held: samples of each copy, below their types, [count, kept sets].
    """
    others = np.ones(len(numbers), np.bool_)
    for i in range(len(numbers)):
        if next_ranks[types[i]] >= ends[types[i]]:
            break
        row = types[i] // columns
        position = next_ranks[types[i]] - firsts[row]
        next_ranks[types[i]] += 1
        number = sets[row] + position // len(held)
        if position >= 0 and kept[number]:
            copy = (position + below(len(held), seed, number)) % len(held)
            held[copy, filled[copy]] = (types[i] << NUMBER_BITS) | numbers[i]
            filled[copy] += 1
            others[i] = False
    return others


def random_parts(packed: NDArray[np.bool_], count: int, seed: int) -> Iterator[Ints]:
    """Yield the numbers of `packed` samples [N], divided at random into `count` parts, each ascending."""
    for part in range(count):
        found = (piece.start + _drawn(packed[piece], piece.start, part, count, seed) for piece in pieces(len(packed)))
        yield np.concatenate(list(found))


@numba.njit(cache=True)
def _drawn(packed: NDArray[np.bool_], first: int, part: int, count: int, seed: int) -> Ints:
    drawn = np.zeros(len(packed), np.bool_)
    for i in range(len(packed)):
        drawn[i] = packed[i] and below(count, seed, first + i) == part
    return np.flatnonzero(drawn)
