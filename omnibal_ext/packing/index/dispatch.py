"""Packs to iterations: which packs each data-parallel rank runs, at any position of any epoch.

The packs of an iteration depend on the global batch alone: any data-parallel size that divides it sees the same stream.
"""

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.packing.index.epoch_order import EMPTY_PACK, EpochOrder
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.ordering.deal_to_ranks import deal, deal_level

__all__ = ["EMPTY_PACK", "PackStream", "deal", "epoch_iterations"]


class PackStream:
    """The packs of every iteration of training, as a function of the iteration number alone.

    With `last_iteration` "next_epoch" (kept in the index) epochs follow each other without a gap: the iteration at an
    epoch's end is filled with packs of the next one. With "empty" it is filled with `EMPTY_PACK`.
    """

    def __init__(
        self, index: PackedIndex, data_parallel_size: int, micro_batches: int, last_iteration: str | None = None
    ) -> None:
        """`last_iteration` in place of the index's. Raises UserError when that was written for another global batch."""
        if data_parallel_size < 1 or micro_batches < 1:
            raise UserError(
                f"data-parallel size {data_parallel_size} x micro-batches {micro_batches}: both must be 1 or more"
            )
        if data_parallel_size * micro_batches != index.global_batch:
            raise UserError(
                f"{index.folder}: packed for a global batch of {index.global_batch} packs, but {data_parallel_size} "
                f"data-parallel ranks x {micro_batches} micro-batches are {data_parallel_size * micro_batches}: "
                "keep the product, or pack again"
            )
        if index.num_packs == 0:
            raise UserError(f"{index.folder}: holds no packs")
        self._index = index
        self._data_parallel_size = data_parallel_size
        self._dealt = data_parallel_size == index.manifest.get("data_parallel_size", data_parallel_size)
        self.order = EpochOrder(
            index.manifest["epoch_packs"],
            index.global_batch,
            int(index.manifest["seed"]),
            (last_iteration or index.manifest["last_iteration"]) == "empty",
            index.manifest.get("epoch_parts", ()),
        )

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations that run packs of epoch 0, the incomplete last one included."""
        return self.order.first_iteration(1)

    def first_iteration(self, epoch: float) -> int:
        """Return the first iteration that starts in an epoch: how many it takes to train for so many epochs."""
        return self.order.first_iteration(epoch)

    def iteration(self, number: int) -> NDArray[np.int64]:
        """Return the pack numbers of iteration `number`, counted from 0 over all epochs: int64 [D, M]."""
        return self.iterations(number, number + 1)[0]

    def iterations(self, first: int, end: int) -> NDArray[np.int64]:
        """Return the pack numbers of iterations `first` to `end` - 1: int64 [end - first, D, M].

        Groups are stored level for the data-parallel size they were packed for. Others, and the iterations that are no
        group, at an epoch's end, are levelled here.
        """
        batch = self.order.global_batch
        groups = self.order.packs(first * batch, end * batch).reshape(-1, batch)
        dealt = deal(groups, self._data_parallel_size)
        stored = self.order.are_groups(groups) & self._dealt
        for number in np.flatnonzero(~stored):
            packs = np.unique(groups[number])  # -1 is an empty pack
            local = np.searchsorted(packs, groups[number])
            seconds = self._index.seconds(np.maximum(packs, 0)) * (packs >= 0)[:, None]
            dealt[number] = packs[deal_level(seconds, local[None], self._data_parallel_size)[0]]
        return dealt

    def epoch_of(self, number: int) -> int:
        """Return the epoch that iteration `number` starts in."""
        return self.order.epoch_at(number * self.order.global_batch)


def epoch_iterations(stream: PackStream) -> NDArray[np.int64]:
    """Return the pack numbers of every iteration of epoch 0: int64 [iterations, D, M]."""
    return stream.iterations(0, stream.iterations_per_epoch)
