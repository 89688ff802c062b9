"""Which packs each data-parallel rank runs in any iteration.

An iteration's packs depend on the global batch alone, so every data-parallel size that divides it runs the same packs
in it.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.errors import UserError
from omnibal_ext.packing.index.epoch_order import EpochOrder
from omnibal_ext.packing.index.packed_index import PackedIndex, WidePackArrays
from omnibal_ext.packing.index.rebalanced import RankLayout, read_rebalanced
from omnibal_ext.packing.ordering.balance_ranks import assign_zigzag, balance_iterations
from omnibal_ext.packing.ordering.slots import fill_slots
from omnibal_ext.packing.packs import EMPTY_PACK

__all__ = ["EMPTY_PACK", "PackStream", "assign_zigzag", "epoch_iterations"]


class PackStream:
    """The packs of every iteration of training, as a function of the iteration's number.

    The last iteration of an epoch is completed with packs of the next epoch (`last_iteration` "next_epoch"), or with
    `EMPTY_PACK` ("empty").
    """

    def __init__(
        self, index: PackedIndex, data_parallel_size: int, micro_batches: int, last_iteration: str | None = None
    ) -> None:
        """Read an index for these ranks; `last_iteration` None: as the index says. Raises UserError for another global
        batch."""
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
        self._rebalanced = None
        """Stored groups, regrouped for these ranks; None: not regrouped."""
        self.is_balanced = data_parallel_size == index.manifest.get("data_parallel_size", data_parallel_size)
        """Whether stored groups are balanced for these ranks."""
        if not self.is_balanced and not index.wide:
            self._rebalanced = read_rebalanced(index, RankLayout(data_parallel_size, micro_batches, last_iteration))
            self.is_balanced = self._rebalanced is not None

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations that run packs of epoch 0, including an incomplete last one."""
        return self.order.first_iteration(1)

    def first_iteration(self, epoch: float) -> int:
        """Return the first iteration that starts in an epoch, counted from 0; `epoch` 1.5 is the middle of epoch 1."""
        return self.order.first_iteration(epoch)

    def beyond(self, epochs: int) -> int:
        """Return how many packs of a later epoch complete the last iteration of `epochs` epochs; 0 with wide packs."""
        return self.first_iteration(epochs) * self.order.global_batch - self.order.start_of(epochs)

    def of_rank(self, rank: int, iteration: int) -> Iterator[int]:
        """Yield the pack numbers that a data-parallel rank runs from an iteration on, one at a time, without end."""
        for number in count(iteration):
            yield from self.iterations(number, number + 1)[0, rank].tolist()

    def iteration(self, number: int) -> Ints:
        """Return the pack numbers of iteration `number`, counted from 0 over all epochs: int64 [D, M]."""
        return self.iterations(number, number + 1)[0]

    def iterations(self, first: int, end: int) -> Ints:
        """Return the pack numbers of iterations `first` to `end` - 1: int64 [end - first, D, M].

        Stored groups are balanced for the index's data-parallel size, or for the one of `omnibal level`. All other
        iterations are balanced here.
        """
        batch = self.order.global_batch
        groups = self.order.packs(first * batch, end * batch).reshape(-1, batch)
        if self._index.wide is not None:
            return self._slots_of(groups, self._index.wide)
        balanced = self.order.are_groups(groups) & self.is_balanced
        if self._rebalanced is not None:
            groups, regrouped = self._rebalanced.packs(self.order, first, groups)
            balanced &= regrouped
        slots = assign_zigzag(groups, self._data_parallel_size)
        for number in np.flatnonzero(~balanced):
            slots[number] = self._assigned(groups[number])
        return slots

    def _assigned(self, group: Ints) -> Ints:
        """Return an iteration's pack numbers [B] assigned to ranks of equal seconds: [D, M]."""
        packs = np.unique(group)  # -1 is an empty pack
        local = np.searchsorted(packs, group)
        seconds = self._index.seconds(np.maximum(packs, 0)) * (packs >= 0)[:, None]
        return packs[balance_iterations(seconds, local[None], self._data_parallel_size)[0]]

    def _slots_of(self, groups: Ints, wide: WidePackArrays) -> Ints:
        """Return the packs in stored iterations' slots [I, B]: [I, D, M], assigned anew for another number of ranks."""
        ranks, micro_batches = self._data_parallel_size, groups.shape[1] // self._data_parallel_size
        tables = np.asarray(wide.pack_seats[groups])
        if self.is_balanced:
            return tables.reshape(len(groups), ranks, micro_batches)
        slots = []
        for table in tables:
            packs = np.unique(table[table >= 0])
            widths = np.asarray(wide.pack_widths[packs])
            slots.append(fill_slots(packs, self._index.seconds(packs), widths, ranks, micro_batches))
        return np.stack(slots)

    def epoch_of(self, number: int) -> int:
        """Return the epoch that iteration `number` starts in."""
        return self.order.epoch_at(number * self.order.global_batch)

    def samples_before(self, iteration: int) -> int:
        """Return how many samples all ranks run before an iteration; those of a wide pack count once."""
        index, starts = self._index, range(0, iteration, 1000)
        counts = np.append(np.diff(index.pack_offsets), 0)  # the last entry is for EMPTY_PACK, -1
        slots = counts / np.append([1] * index.num_packs if index.wide is None else index.wide.pack_widths, 1)
        return round(sum(slots[self.iterations(start, min(start + 1000, iteration))].sum() for start in starts))


def _refuse_half_teams(index: PackedIndex, data_parallel_size: int) -> None:
    """Raise UserError if the data-parallel size is not a multiple of the widest pack's width."""
    if data_parallel_size % index.widths[-1]:
        raise UserError(
            f"{index.folder}: has packs of {index.widths[-1]} ranks, which must divide the {data_parallel_size} "
            "data-parallel ranks: use other ranks, or pack again with other --widths"
        )


def epoch_iterations(stream: PackStream) -> Ints:
    """Return the pack numbers of every iteration of epoch 0: int64 [iterations, D, M]."""
    return stream.iterations(0, stream.iterations_per_epoch)
