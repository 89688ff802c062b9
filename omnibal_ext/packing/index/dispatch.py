"""Packs to iterations: which packs each data-parallel rank runs, at any position of any epoch.

The packs of an iteration depend on the global batch alone: any data-parallel size that divides it sees the same stream.
"""

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Ints
from omnibal_ext.errors import UserError
from omnibal_ext.packing.index.epoch_order import EMPTY_PACK, EpochOrder
from omnibal_ext.packing.index.level_again import Levelled, Ranks, read_levelled
from omnibal_ext.packing.index.packed_index import PackedIndex, Teams
from omnibal_ext.packing.ordering.deal_to_ranks import deal, deal_level
from omnibal_ext.packing.ordering.seats import deal_seats

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
        _refuse_half_teams(index, data_parallel_size)
        last_iteration = last_iteration or str(index.manifest["last_iteration"])
        self.order = EpochOrder.of_manifest(index.manifest, last_iteration)
        self._dealt = data_parallel_size == index.manifest.get("data_parallel_size", data_parallel_size)
        ranks = Ranks(data_parallel_size, micro_batches, last_iteration)
        self._levelled = None if self._dealt or index.teams else read_levelled(index, ranks)

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations that run packs of epoch 0, the incomplete last one included."""
        return self.order.first_iteration(1)

    def first_iteration(self, epoch: float) -> int:
        """Return the first iteration that starts in an epoch: how many it takes to train for so many epochs."""
        return self.order.first_iteration(epoch)

    def beyond(self, epochs: int) -> int:
        """Return how many packs of later epochs the iterations run that it takes to train for so many epochs.

        (Seats, where packs may be wider than a rank: none.)
        """
        return self.first_iteration(epochs) * self.order.global_batch - self.order.start_of(epochs)

    def iteration(self, number: int) -> Ints:
        """Return the pack numbers of iteration `number`, counted from 0 over all epochs: int64 [D, M]."""
        return self.iterations(number, number + 1)[0]

    def iterations(self, first: int, end: int) -> Ints:
        """Return the pack numbers of iterations `first` to `end` - 1: int64 [end - first, D, M].

        Groups are stored level for the data-parallel size they were packed for, and levelled again for another one
        where `level_again` has done so. Others, and the iterations that are no group, at an epoch's end, are levelled
        here.
        """
        batch = self.order.global_batch
        groups = self.order.packs(first * batch, end * batch).reshape(-1, batch)
        if self._index.teams is not None:
            return self._seated(groups, self._index.teams)
        stored = self.order.are_groups(groups)
        if self._levelled is not None:
            groups, levelled = self._level_again(self._levelled, first, groups)
            stored &= levelled
        elif not self._dealt:
            stored[:] = False
        dealt = deal(groups, self._data_parallel_size)
        for number in np.flatnonzero(~stored):
            packs = np.unique(groups[number])  # -1 is an empty pack
            local = np.searchsorted(packs, groups[number])
            seconds = self._index.seconds(np.maximum(packs, 0)) * (packs >= 0)[:, None]
            dealt[number] = packs[deal_level(seconds, local[None], self._data_parallel_size)[0]]
        return dealt

    def _seated(self, groups: Ints, teams: Teams) -> Ints:
        """Return who sits in the seats of stored iterations, [I, B]: as stored, or level for other ranks."""
        ranks, micro_batches = self._data_parallel_size, groups.shape[1] // self._data_parallel_size
        tables = np.asarray(teams.pack_seats[groups])
        if self._dealt:
            return tables.reshape(len(groups), ranks, micro_batches)
        dealt = []
        for table in tables:
            packs = np.unique(table[table >= 0])
            widths = np.asarray(teams.pack_widths[packs])
            dealt.append(deal_seats(packs, self._index.seconds(packs), widths, ranks, micro_batches))
        return np.stack(dealt)

    def _level_again(self, levelled: Levelled, first: int, groups: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the packs that run instead of `groups` [I, B], from iteration `first` on, and in which iterations."""
        batch = self.order.global_batch
        positions, packs = first * batch + np.arange(groups.size), groups.ravel().copy()
        start, epoch = levelled.since * batch, self.order.epoch_at(levelled.since * batch)
        begins = self.order.start_of(epoch)  # the first epoch that begins at `since` or later
        later = positions >= (begins if begins == start else self.order.start_of(epoch + 1))
        swapped = later & (packs >= 0)
        packs[swapped] = levelled.places[packs[swapped]]
        rest = (positions >= start) & (positions < start + len(levelled.rest))
        packs[rest] = levelled.rest[positions[rest] - start]
        return packs.reshape(-1, batch), np.all((later | rest).reshape(groups.shape), axis=1)

    def epoch_of(self, number: int) -> int:
        """Return the epoch that iteration `number` starts in."""
        return self.order.epoch_at(number * self.order.global_batch)


def _refuse_half_teams(index: PackedIndex, data_parallel_size: int) -> None:
    """Raise UserError where the ranks are no whole teams."""
    if data_parallel_size % index.widths[-1]:
        raise UserError(
            f"{index.folder}: has packs of {index.widths[-1]} ranks, which must divide the {data_parallel_size} "
            "data-parallel ranks: use other ranks, or pack again with other --widths"
        )


def epoch_iterations(stream: PackStream) -> Ints:
    """Return the pack numbers of every iteration of epoch 0: int64 [iterations, D, M]."""
    return stream.iterations(0, stream.iterations_per_epoch)
