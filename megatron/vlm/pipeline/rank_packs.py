"""What a rank reads, iteration by iteration: the packs of its chunks, and the images that it encodes for others."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core import parallel_state

from megatron.vlm.data.image_shard import ImageShardDataset, numbered
from megatron.vlm.data.loader import PackDataset, PackLoader
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.encoding import Images
from omnibal_ext.errors import UserError
from omnibal_ext.plan_tower import Tower
from omnibal_ext.tower_encoding import EncoderRank


class RankPacks:
    """Of one dataset: `chunks`, and with a replicated tower `images`, this rank's parts of the same packs."""

    def __init__(
        self,
        tower: Tower | None,
        num_workers: int = 0,
        reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.tower, self.num_workers, self.reading = tower, num_workers, reading
        self.chunks: list[PackLoader] = []
        self.images: PackLoader | None = None
        self.microbatches = 0

    def add(self, dataset: PackDataset, order: Callable[[], Iterable[int]], microbatches: int) -> PackLoader:
        """Open the packs of one more chunk, in iterations of so many; with the first chunk also the images.

        Raises UserError for packs that several ranks run together, if there is a replicated tower.
        """
        packs = PackLoader(dataset, order(), self.num_workers, self.reading)
        self.chunks.append(packs)
        if self.tower is None or self.images is not None:
            return packs
        if (widest := max(dataset.index.widths)) > 1:
            raise UserError(
                f"{dataset.index.folder}: has packs that {widest} ranks run together, which "
                "does not go with a tower beside the pipeline; plan with --tower cut"
            )
        tensor = parallel_state.get_tensor_model_parallel_group()
        here = parallel_state.get_pipeline_model_parallel_rank()
        encoder = EncoderRank(self.tower.parts, here, tensor.rank(), tensor.size())
        parts, self.microbatches = ImageShardDataset(dataset.data, dataset.index, encoder), microbatches
        self.images = PackLoader(parts, numbered(order(), microbatches), self.num_workers, self.reading)
        return packs

    def begin(self, saw: Callable[[Microbatch], None], iteration: int) -> dict[str, Any]:
        """What the executor gets for an iteration, besides the chunks' packs; `saw` is called with parts that come."""
        for loader in self._all:
            loader.taken.clear()
        return {} if self.images is None else {"images": Images(_told(self.images, saw), iteration)}

    def again(self, saw: Callable[[Microbatch], None], iteration: int) -> dict[str, Any]:
        """What it gets for the same iteration, rerun. The next one's images follow, as a tower that runs ahead has
        taken them."""
        packs = {"data_iterator": [map(loader.dataset.__getitem__, [*loader.taken]) for loader in self.chunks]}
        if self.images is None:
            return packs
        taken = self.chunks[0].taken, self.images.taken[-self.microbatches :]
        keys = [(pack, number) for each in taken for number, pack in enumerate(each)]
        return {**packs, "images": Images(_told(map(self.images.dataset.__getitem__, keys), saw), iteration)}

    def close(self) -> None:
        """End the processes that read ahead, for which Python's exit would wait one by one."""
        for loader in self._all:
            loader.close()

    @property
    def _all(self) -> list[PackLoader]:
        return self.chunks + ([] if self.images is None else [self.images])


def _told(parts: Iterator[Microbatch], saw: Callable[[Microbatch], None]) -> Iterator[Microbatch]:
    for part in parts:
        saw(part)
        yield part
