"""Packs to iterations: which packs each data-parallel rank runs, at any position of any epoch.

An index stores packs in groups of one global batch (data-parallel ranks x micro-batches) that belong together; what
does not fill a group stands last. An epoch shuffles whole groups, so levelness survives shuffling, and the packs of an
iteration depend on the global batch alone: any data-parallel size that divides it sees the same stream.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.packing.index import PackedIndex

EMPTY_PACK = -1  # stands for a pack of zero weight: no samples, no loss
LAST_ITERATION = ("next_epoch", "empty")


def deal(groups: NDArray[np.int64], data_parallel_size: int) -> NDArray[np.int64]:
    """Deal each global batch of packs over D ranks to and fro, so that sums stay level: [I, D * M] to [I, D, M].

    0 1 2 3 4 5 over 2 ranks: rank 0 runs 0 3 4, rank 1 runs 1 2 5.
    """
    rounds = groups.reshape(len(groups), -1, data_parallel_size).copy()
    rounds[:, 1::2] = rounds[:, 1::2, ::-1]
    return np.ascontiguousarray(rounds.transpose(0, 2, 1))


class PackStream:
    """The packs of every iteration of training, as a function of the iteration number alone.

    With `last_iteration` "next_epoch" (kept in the index) epochs follow each other without a gap: the iteration at an
    epoch's end is filled with packs of the next one. With "empty" it is filled with `EMPTY_PACK`.
    """

    def __init__(self, index: PackedIndex, data_parallel_size: int, micro_batches: int) -> None:
        """Raises UserError when the index was written for another global batch."""
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
        self._data_parallel_size = data_parallel_size
        self._global_batch = index.global_batch
        self._seed = int(index.manifest["seed"])
        self._fill_with_next = index.manifest["last_iteration"] == "next_epoch"
        self._section_ends = np.cumsum(index.manifest["epoch_packs"])
        self._order = lru_cache(maxsize=2)(self._shuffled_epoch)
        if index.num_packs == 0:
            raise UserError(f"{index.folder}: holds no packs")

    @property
    def iterations_per_epoch(self) -> int:
        """Iterations that run packs of epoch 0, the incomplete last one included."""
        return -(-int(self._section_ends[0]) // self._global_batch)

    def iteration(self, number: int) -> NDArray[np.int64]:
        """Return the pack numbers of iteration `number`, counted from 0 over all epochs: int64 [D, M]."""
        return self.iterations(number, number + 1)[0]

    def iterations(self, first: int, end: int) -> NDArray[np.int64]:
        """Return the pack numbers of iterations `first` to `end` - 1: int64 [end - first, D, M]."""
        position, last = first * self._global_batch, end * self._global_batch
        packs: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        while position < last:
            epoch, start = self._epoch_at(position)
            packs.append(self._order(epoch)[position - start : last - start])
            position += len(packs[-1])
        return deal(np.concatenate(packs).reshape(-1, self._global_batch), self._data_parallel_size)

    def epoch_of(self, number: int) -> int:
        """Return the epoch that iteration `number` starts in."""
        return self._epoch_at(number * self._global_batch)[0]

    def _lengths(self) -> NDArray[np.int64]:
        """Positions that each stored epoch takes in the stream."""
        packs = np.diff(self._section_ends, prepend=0)
        return packs if self._fill_with_next else -(-packs // self._global_batch) * self._global_batch

    def _epoch_at(self, position: int) -> tuple[int, int]:
        """Return the epoch that holds a position of the stream, and the position where that epoch starts."""
        ends = np.cumsum(self._lengths())
        cycle, rest = divmod(position, int(ends[-1]))
        section = int(np.searchsorted(ends, rest, side="right"))
        start = cycle * int(ends[-1]) + (int(ends[section - 1]) if section else 0)
        return cycle * len(ends) + section, start

    def _start_of(self, epoch: int) -> int:
        lengths = self._lengths()
        cycle, section = divmod(epoch, len(lengths))
        return cycle * int(lengths.sum()) + int(lengths[:section].sum())

    def _shuffled_epoch(self, epoch: int) -> NDArray[np.int64]:
        """Order the packs of one epoch: every pack once, groups kept together.

        1. Cut the stored packs into whole groups and the rest that fills none.
        2. Shuffle the groups (epochs beyond the stored ones; the stored order is shuffled already).
        3. The iteration that the previous epoch left open takes its packs from the rest, and from one group if
           these do not suffice; what remains of both stands last.
        """
        section = epoch % len(self._section_ends)
        first, end = int(np.append(0, self._section_ends)[section]), int(self._section_ends[section])
        whole = (end - first) // self._global_batch
        groups = np.arange(first, first + whole * self._global_batch).reshape(whole, self._global_batch)
        rest = np.arange(first + whole * self._global_batch, end)
        if epoch >= len(self._section_ends):
            groups = np.random.default_rng((self._seed, epoch)).permutation(groups)
        if not self._fill_with_next:
            missing = -len(rest) % self._global_batch
            return np.concatenate([groups.ravel(), rest, np.full(missing, EMPTY_PACK)])
        wanted = -self._start_of(epoch) % self._global_batch
        if wanted > len(rest) and len(groups):
            groups, rest = groups[:-1], np.concatenate([rest, groups[-1]])
        return np.concatenate([rest[:wanted], groups.ravel(), rest[wanted:]])


def epoch_iterations(stream: PackStream) -> NDArray[np.int64]:
    """Return the pack numbers of every iteration of epoch 0: int64 [iterations, D, M]."""
    return stream.iterations(0, stream.iterations_per_epoch)
