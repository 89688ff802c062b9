"""Packs: which samples share a microbatch, and what each pack costs.

sample_ids  3 0 5 | 1 4 | 2          pack_offsets  0 3 5 6
            pack 0  pack 1  pack 2
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.sizes import Sizes

TILES, TOKENS, ATTENTION = 0, 1, 2  # columns of loads
EMPTY_PACK = -1  # pack number of an empty slot: no samples, no loss
LOADS = ("tiles", "tokens", "attention")  # names of the first columns; further sizes follow


@dataclass(frozen=True, slots=True)
class PackList:
    """Samples of pack p are `sample_ids[pack_offsets[p]:pack_offsets[p + 1]]`; no pack is empty."""

    pack_offsets: NDArray[np.int64]  # [P + 1]
    sample_ids: NDArray[np.int64]  # [N]

    def __len__(self) -> int:
        return len(self.pack_offsets) - 1

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of samples in each pack, [P]."""
        return np.diff(self.pack_offsets)

    def reordered(self, order: NDArray[np.int64]) -> "PackList":
        """Return the packs of these numbers in this order: new pack i is old pack `order[i]`."""
        counts = self.pack_offsets[order + 1] - self.pack_offsets[order]
        offsets = offsets_of(counts)
        # Position j of new pack i reads old position start(order[i]) + j.
        shift = np.repeat(self.pack_offsets[order] - offsets[:-1], counts)
        shift += np.arange(len(shift))
        return PackList(offsets, self.sample_ids[shift])

    def between(self, first: int, end: int) -> "PackList":
        """Return packs `first` to `end` - 1."""
        offsets = self.pack_offsets[first : end + 1]
        return PackList(offsets - offsets[0], self.sample_ids[offsets[0] : offsets[-1]])

    @classmethod
    def from_lists(cls, packs: Sequence[Sequence[int]]) -> "PackList":
        """Make packs from lists of samples, none of them empty."""
        counts = np.array([len(pack) for pack in packs], np.int64)
        return cls(offsets_of(counts), np.array([sample for pack in packs for sample in pack], np.int64))

    @classmethod
    def concatenate(cls, parts: Sequence["PackList"]) -> "PackList":
        """Concatenate lists of packs, in order; an empty list if there are none."""
        if not parts:
            return cls(np.zeros(1, np.int64), np.zeros(0, np.int64))
        if len(parts) == 1:
            return parts[0]
        return cls(
            offsets_of(np.concatenate([packs.counts for packs in parts])),
            np.concatenate([packs.sample_ids for packs in parts]),
        )


@dataclass(frozen=True, slots=True)
class LoadedPacks:
    """Packs and the loads of each: tiles, tokens, attention and further sizes."""

    packs: PackList
    loads: NDArray[np.int64]  # [P, K]

    def __getitem__(self, rows: slice) -> "LoadedPacks":
        first, end, _ = rows.indices(len(self.packs))
        return LoadedPacks(self.packs.between(first, end), self.loads[first:end])

    def reordered(self, order: NDArray[np.int64]) -> "LoadedPacks":
        """Return the packs of these numbers in this order: new pack i is old pack `order[i]`."""
        return LoadedPacks(self.packs.reordered(order), self.loads[order])

    @classmethod
    def concatenate(cls, parts: Sequence["LoadedPacks"]) -> "LoadedPacks":
        """Concatenate one or more lists of packs."""
        return cls(PackList.concatenate([each.packs for each in parts]), np.concatenate([each.loads for each in parts]))


def offsets_of(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where packs of `counts` samples begin, and the last one ends: [0, c0, c0 + c1, ...]."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def sample_loads(sizes: Sizes) -> NDArray[np.int64]:
    """Return each sample's loads, alone in a pack: tiles, tokens, squared tokens, further sizes: [N, K]."""
    tokens = sizes.tokens
    return np.column_stack([sizes.tiles.astype(np.int64), tokens, tokens * tokens, *sizes.more.values()])


def pack_loads(packs: PackList, sizes: Sizes, pad: bool = False) -> NDArray[np.int64]:
    """Return the loads of each pack: tiles, tokens, attention sum(length^2), further sizes: [P, K].

    With `pad` every sample counts as long as the longest of its pack.
    """
    loads = np.zeros((len(packs), len(LOADS) + len(sizes.more)), np.int64)
    if len(packs) == 0:
        return loads
    starts, tokens = packs.pack_offsets[:-1], sizes.tokens[packs.sample_ids].astype(np.int64, copy=False)
    np.add.reduceat(sizes.tiles[packs.sample_ids], starts, dtype=np.int64, out=loads[:, TILES])
    for column, values in enumerate(sizes.more.values(), len(LOADS)):
        np.add.reduceat(values[packs.sample_ids], starts, out=loads[:, column])
    if pad:
        longest = np.maximum.reduceat(tokens, starts)
        loads[:, TOKENS] = longest * packs.counts
        loads[:, ATTENTION] = longest**2 * packs.counts
    else:
        np.add.reduceat(tokens, starts, out=loads[:, TOKENS])
        np.add.reduceat(tokens * tokens, starts, out=loads[:, ATTENTION])
    return loads
