"""The images that a rank encodes for a tower beside the pipeline, iteration by iteration: a stream beside its packs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.core import parallel_state

from megatron.vlm.data.image_shard import ImageShardDataset, NumberedPacks
from megatron.vlm.data.loader import PackLoader
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.encoding import Images
from omnibal_ext.errors import UserError
from omnibal_ext.plan_tower import Tower
from omnibal_ext.tower import Worker

Saw = Callable[[Microbatch], None]


class ImageStreams:
    """This rank's parts of the packs of training (`True`), and of those held out; without a tower there are none."""

    def __init__(self, tower: Tower | None, num_workers: int = 0) -> None:
        self.tower, self.num_workers = tower, num_workers
        self._streams: dict[bool, PackLoader] = {}
        self._microbatches: dict[bool, int] = {}

    def add(
        self,
        training: bool,
        packs: PackLoader,
        order: Iterable[int],
        microbatches: int,
        reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """The parts of `packs`, whose numbers are `order`, of iterations of so many microbatches; once a rank.

        Raises UserError for packs that several ranks run together.
        """
        if self.tower is None or training in self._streams:
            return
        index = packs.dataset.index
        if (widest := max(index.widths)) > 1:
            raise UserError(
                f"{index.folder}: has packs that {widest} ranks run together, which "
                "does not go with a tower beside the pipeline; plan with --tower cut"
            )
        tensor = parallel_state.get_tensor_model_parallel_group()
        here = parallel_state.get_pipeline_model_parallel_rank()
        worker = Worker(self.tower.parts, here, tensor.rank(), tensor.size())
        dataset = ImageShardDataset(packs.dataset.data, index, worker)
        self._streams[training] = PackLoader(dataset, NumberedPacks(order, microbatches), self.num_workers, reading)
        self._microbatches[training] = microbatches

    def begin(self, training: bool, saw: Saw, iteration: int) -> dict[str, Images]:
        """What the executor is handed for an iteration; `saw` is told of every part that comes."""
        if self.tower is None:
            return {}
        self._streams[training].begin_iteration()
        return self._images(self._streams[training], saw, iteration)

    def again(self, training: bool, packs: list[int], saw: Saw, iteration: int) -> dict[str, Images]:
        """What it is handed for an iteration of these `packs` that is run once more; behind it the next one's, of a
        tower that runs ahead: they have been taken."""
        if self.tower is None:
            return {}
        stream = self._streams[training]
        following = stream.taken[-self._microbatches[training] :]
        keys = [*((pack, number) for number, pack in enumerate(packs)), *following]
        return self._images((stream.dataset[key] for key in keys), saw, iteration)

    def close(self) -> None:
        """End the processes that read ahead."""
        for stream in self._streams.values():
            stream.close()

    def _images(self, parts: Iterator[Microbatch], saw: Saw, iteration: int) -> dict[str, Images]:
        def told() -> Iterator[Microbatch]:
            for part in parts:
                saw(part)
                yield part

        return {"images": Images(told(), iteration)}
