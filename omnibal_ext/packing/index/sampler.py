"""Balanced packs for any training loop: a batch sampler over a packed index, without Megatron."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex


class PackBatchSampler:
    """Yields the sample numbers of one pack at a time, for one data-parallel rank.

    Pass it to PyTorch as `DataLoader(dataset, batch_sampler=..., collate_fn=...)`, which takes any iterable of lists;
    the collate function joins the samples of a pack. Every rank yields `micro_batches` packs per optimizer step (by
    default the index's global batch divided by the ranks), and all ranks equally many steps per epoch.

    Iteration stops at the end of an epoch, in which each sample is as often as its weight says; the next `iter()`
    continues with the next epoch. If the packs do not fill the last step, the largest are split; a pack is an empty
    list only if a step has fewer samples than packs. `state_dict` is the position after the last complete step: a run
    resumes exactly, also at another data-parallel size with the same global batch.

    With `rank` None it yields the packs of all ranks in turn, for libraries that shard batches: Accelerate gives batch
    i to process i modulo the number of processes (with `even_batches=False`), so each gets its rank's packs.
    """

    def __init__(
        self, index: PackedIndex, data_parallel_size: int, rank: int | None = None, micro_batches: int | None = None
    ) -> None:
        """Read an index for these ranks. Raises UserError for one of another global batch, or with wide packs."""
        if micro_batches is None:
            micro_batches = max(1, index.global_batch // max(1, data_parallel_size))
        if rank is not None and not 0 <= rank < data_parallel_size:
            raise UserError(f"rank {rank} is not one of {data_parallel_size} data-parallel ranks")
        if index.wide is not None:
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
        """Count the packs yielded in the current epoch."""
        epoch = self._stream.epoch_of(self._step)
        return (self._stream.first_iteration(epoch + 1) - self._stream.first_iteration(epoch)) * self._packs_a_step

    def __iter__(self) -> Iterator[list[int]]:
        """Yield packs, lists of sample numbers, from the position to the end of its epoch."""
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
        """None, as packs differ in size. Libraries read it before they shard the batches.

        Raises UserError if the sampler has a rank, as each process would get only some of that rank's packs.
        """
        if self._rank is not None:
            raise UserError(
                f"PackBatchSampler: made for rank {self._rank}, but about to be sharded again: leave its rank out, and "
                "set even_batches=False"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position: complete steps yielded. With workers, a `DataLoader` is ahead of the training loop."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a saved state."""
        self._step = int(state["step"])


def _packs(index: PackedIndex, iteration: NDArray[np.int64]) -> list[list[list[int]]]:
    """Return the sample numbers of an iteration's packs [D, M]; for each empty one the largest is halved."""
    packs = [[index.samples(pack).tolist() if pack >= 0 else [] for pack in rank] for rank in iteration.tolist()]
    empty = [(rank, turn) for rank, of_rank in enumerate(packs) for turn, samples in enumerate(of_rank) if not samples]
    for rank, turn in empty:
        # of equally long ones the same, whichever rank runs it
        longest = max((samples for of_rank in packs for samples in of_rank), key=lambda each: (len(each), each))
        half = (len(longest) + 1) // 2
        packs[rank][turn] = longest[half:]
        del longest[half:]
    return packs
