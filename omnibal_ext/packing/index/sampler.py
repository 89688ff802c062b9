"""Balanced packs for any training loop: a batch sampler over a packed index, without Megatron."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex


class PackBatchSampler:
    """Yields the sample numbers of one pack after the other, for one data-parallel rank.

    Give it to PyTorch as `DataLoader(dataset, batch_sampler=..., collate_fn=...)`, which takes any iterable of lists;
    the collate function joins the samples of a pack. Every rank yields `micro_batches` packs an optimizer
    step, and equally many steps an epoch: without them as many as the index's global batch has for each rank.

    An epoch ends the iteration, after every sample as often as its weight says; the next `iter()` goes on with the next
    epoch. Where an epoch's packs do not fill its last step, they are divided: a pack is an empty list only where a step
    has fewer samples than packs.
    `state_dict` is the position after the last whole step, so that a run resumes exactly, also at another
    data-parallel size with the same global batch.

    Without a rank it yields the packs of all ranks in turn, for what shards batches itself: Accelerate hands batch i to
    process i modulo the number of processes (with `even_batches=False`), and each gets its own packs.
    """

    def __init__(
        self, index: PackedIndex, data_parallel_size: int, rank: int | None = None, micro_batches: int | None = None
    ) -> None:
        """Raises UserError when the index was packed for another global batch."""
        if micro_batches is None:
            micro_batches = max(1, index.global_batch // max(1, data_parallel_size))
        if rank is not None and not 0 <= rank < data_parallel_size:
            raise UserError(f"rank {rank} is not one of {data_parallel_size} data-parallel ranks")
        if index.teams is not None:
            raise UserError(
                f"{index.folder}: has packs wider than a rank, which only this project's trainer runs; pack without "
                "--widths"
            )
        self.micro_batches = micro_batches
        self._index = index
        self._stream = PackStream(index, data_parallel_size, micro_batches, last_iteration="empty")
        self._rank = rank
        self._packs_a_step = micro_batches * (data_parallel_size if rank is None else 1)
        self._step = 0

    def __len__(self) -> int:
        """Packs yielded in the epoch in which the position is."""
        epoch = self._stream.epoch_of(self._step)
        return (self._stream.first_iteration(epoch + 1) - self._stream.first_iteration(epoch)) * self._packs_a_step

    def __iter__(self) -> Iterator[list[int]]:
        """Run to the end of the epoch in which the position is."""
        end = self._stream.first_iteration(self._stream.epoch_of(self._step) + 1)
        while self._step < end:
            packs = _packs(self._index, self._stream.iteration(self._step))
            turns = [pack for turn in zip(*packs, strict=True) for pack in turn]
            mine = turns if self._rank is None else packs[self._rank]
            for number, pack in enumerate(mine):
                if number == len(mine) - 1:  # counted before it is yielded: a loop may stop right after it
                    self._step += 1
                yield pack

    @property
    def batch_size(self) -> None:
        """None, as packs differ; what asks for it is about to shard, which a sampler of one rank has done already.

        Raises UserError with a rank: Accelerate would give each process a part of that rank's packs.
        """
        if self._rank is not None:
            raise UserError(
                f"PackBatchSampler: made for rank {self._rank}, and about to be sharded once more: leave its rank out, "
                "and set even_batches=False"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position: whole steps taken. With workers, a `DataLoader` reads ahead of the training loop."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self._step = int(state["step"])


def _packs(index: PackedIndex, iteration: NDArray[np.int64]) -> list[list[list[int]]]:
    """Return the samples of each rank's packs; packs of most samples are halved until no rank has an empty one."""
    packs = [[index.samples(pack).tolist() if pack >= 0 else [] for pack in rank] for rank in iteration.tolist()]
    empty = [(rank, turn) for rank, own in enumerate(packs) for turn, samples in enumerate(own) if not samples]
    for rank, turn in empty:
        longest = max((samples for own in packs for samples in own), key=len)
        half = (len(longest) + 1) // 2
        packs[rank][turn] = longest[half:]
        del longest[half:]
    return packs
