"""Balanced packs for any training loop: a batch sampler over a packed index, without Megatron."""

from collections.abc import Iterator
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.packing.dispatch import PackStream
from omnibal_ext.packing.index import PackedIndex


class PackBatchSampler:
    """Yields the sample numbers of one pack after the other, for one data-parallel rank.

    Give it to PyTorch as `DataLoader(dataset, batch_sampler=..., collate_fn=...)`, which takes any iterable of lists;
    the collate function joins the samples of a pack. Every rank yields `micro_batches` packs an optimizer
    step, and equally many steps an epoch. A pack that only fills up the last step (an index with "empty" last
    iterations) is an empty list.

    An epoch ends the iteration; the next `iter()` goes on with the next epoch. `state_dict` is the position after the
    last whole step, so that a run resumes exactly, also at another data-parallel size with the same global batch.
    """

    def __init__(self, index: PackedIndex, data_parallel_size: int, rank: int, micro_batches: int = 1) -> None:
        """Raises UserError when the index was packed for another global batch."""
        if not 0 <= rank < data_parallel_size:
            raise UserError(f"rank {rank} is not one of {data_parallel_size} data-parallel ranks")
        self._index = index
        self._stream = PackStream(index, data_parallel_size, micro_batches)
        self._rank = rank
        self._micro_batches = micro_batches
        self._step = 0

    def __len__(self) -> int:
        """Packs that this rank runs in an epoch."""
        return self._stream.iterations_per_epoch * self._micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        """Run to the end of the epoch in which the position is."""
        per_epoch = self._stream.iterations_per_epoch
        end = (self._step // per_epoch + 1) * per_epoch
        while self._step < end:
            packs = self._stream.iteration(self._step)[self._rank].tolist()
            for number, pack in enumerate(packs):
                if number == self._micro_batches - 1:  # counted before it is yielded: a loop may stop right after it
                    self._step += 1
                yield self._index.samples(pack).tolist() if pack >= 0 else []

    def state_dict(self) -> dict[str, Any]:
        """Return the position: whole steps taken. With workers, a `DataLoader` reads ahead of the training loop."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self._step = int(state["step"])
