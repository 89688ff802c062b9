"""Packs that a rank reads in each iteration: those of its chunks, and with a replicated tower what it encodes."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

from megatron.core import parallel_state

from megatron.vlm.data.encoder_share import EncoderShares, numbered
from megatron.vlm.data.loader import PackDataset, microbatches
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.encoding import ToEncode
from omnibal_ext.errors import UserError
from omnibal_ext.image_assignment import EncoderRank
from omnibal_ext.plan_tower import Tower


class RankPacks:
    """Packs of one dataset for each of this rank's chunks and, with a replicated tower, what it encodes.

    Keeps the numbers of an iteration's packs: a sample that cannot be read makes the iteration rerun.
    """

    def __init__(
        self, tower: Tower | None, num_workers: int = 0,
        reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        self.tower, self.num_workers, self.reading = tower, num_workers, reading
        self.chunks: list[PackDataset] = []
        self.images: EncoderShares | None = None
        self.streams: list[Generator[Microbatch, None, None]] = []
        """One stream of microbatches for each chunk, then that of the images."""
        self.order: Iterator[int] = iter(())
        self.count = 0
        """Packs of an iteration; `order`: pack numbers of the iterations to come."""
        self.packs, self.following = list[int](), list[int]()
        """Numbers of the packs of this iteration, and of the next one."""

    def add(
        self, dataset: PackDataset, order: Callable[[], Iterator[int]], packs: int
    ) -> Generator[Microbatch, None, None]:
        """Return a stream of microbatches for one more chunk of this rank. `order()` iterates over the pack numbers to
        come, `packs` of them an iteration. Raises UserError for wide packs with a replicated tower."""
        if not self.chunks:
            self.order, self.count = order(), packs
            self.following = [*islice(self.order, packs)]
            self._add_images(dataset, order())
        self.chunks.append(dataset)
        self.streams.insert(0, stream := microbatches(dataset, order(), self.num_workers, self.reading))
        return stream

    def _add_images(self, dataset: PackDataset, order: Iterable[int]) -> None:
        if self.tower is None:
            return
        if (widest := max(dataset.index.widths)) > 1:
            raise UserError(
                f"{dataset.index.folder}: has packs that {widest} ranks run together, which "
                "does not go with a tower beside the pipeline; plan with --tower cut"
            )
        tensor = parallel_state.get_tensor_model_parallel_group()
        here = parallel_state.get_pipeline_model_parallel_rank()
        encoder = EncoderRank(self.tower.encoding_ranks, here, tensor.rank(), tensor.size(), self.tower.rates)
        self.images = EncoderShares(dataset.data, dataset.index, encoder)
        self.streams.append(microbatches(self.images, numbered(order, self.count), self.num_workers, self.reading))

    def begin(self, saw: Callable[[Microbatch], None], iteration: int) -> dict[str, Any]:
        """Begin the next iteration; return further arguments for the executor: with a replicated tower the images to
        encode, else none. `saw` is called with each of their shares when it is read."""
        self.packs, self.following = self.following, [*islice(self.order, self.count)]
        return {} if self.images is None else {"images": ToEncode(_told(self.streams[-1], saw), iteration)}

    def rerun(self, saw: Callable[[Microbatch], None], iteration: int) -> dict[str, Any]:
        """Return arguments with which the executor runs the iteration once more, its samples read anew. The next
        iteration's images follow this one's, as a tower that runs ahead has taken them from the stream already."""
        packs = {"data_iterator": [map(chunk.__getitem__, self.packs) for chunk in self.chunks]}
        if self.images is None:
            return packs
        keys = [*numbered(self.packs + self.following, self.count)]
        return {**packs, "images": ToEncode(_told(map(self.images.__getitem__, keys), saw), iteration)}

    def close(self) -> None:
        """End the data workers; at exit, Python would wait for them one by one."""
        for stream in self.streams:
            stream.close()


def _told(shares: Iterator[Microbatch], saw: Callable[[Microbatch], None]) -> Iterator[Microbatch]:
    for share in shares:
        saw(share)
        yield share
