"""Megatron-Bridge, and any loop with Megatron's samplers: a data set whose items are the packs of a packed index.

index = PackedIndex.open("packs")                        # from `omnibal pack`: numbers only, no token is copied
train = PackedIndexDataset(samples, index, data_parallel_size=8, micro_batches=4, join=join)
"""

from collections.abc import Callable, Sequence
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex


class PackedIndexDataset:
    """Item n is the n-th pack in training order, with `micro_batch_size=1` and `dataloader_type="single"`.

    Megatron's sampler gives rank r of D item D x m + r of each iteration's microbatch m, and begins at
    `consumed_samples`: a resumed run goes on with the pack it had not seen. Return it from a `DatasetProvider`'s
    `build_datasets`; its `collate_fn` hands each pack on as it is.
    """

    def __init__(
        self,
        samples: Any,
        index: PackedIndex,
        data_parallel_size: int,
        micro_batches: int,
        join: Callable[[Sequence[Any]], Any],
        epochs: int = 1,
    ) -> None:
        """Read `samples` by number, and `join` those of a pack. Raises UserError if the index is wide or has another
        global batch."""
        if index.wide is not None:
            raise UserError(f"{index.folder}: has packs wider than a rank: pack without --widths")
        self._samples, self._index, self._join = samples, index, join
        self._stream = PackStream(index, data_parallel_size, micro_batches, "next_epoch")
        self._length = self._stream.first_iteration(epochs) * index.global_batch
        self._ranks = data_parallel_size

    def __len__(self) -> int:
        """Count the packs of all epochs, in whole iterations."""
        return self._length

    def __getitem__(self, number: int) -> Any:
        """Return pack `number` in training order, its samples joined. Raises IndexError beyond the last."""
        if not 0 <= number < self._length:
            raise IndexError(number)
        iteration, slot = divmod(number, self._index.global_batch)
        micro_batch, rank = divmod(slot, self._ranks)
        pack = int(self._stream.iteration(iteration)[rank, micro_batch])
        return self._join([self._samples[int(sample)] for sample in self._index.samples(pack)])

    @staticmethod
    def collate_fn(packs: Sequence[Any]) -> Any:
        """Return the one pack of a microbatch."""
        (pack,) = packs
        return pack
