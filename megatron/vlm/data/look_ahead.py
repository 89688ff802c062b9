"""Datasets of microbatches that are planned before they are read, and reading of the next one's files ahead of use.

    worker of two     plan 0, begin 0 and 2 | decode 0 | begin 4 | decode 2 | ...

What lies on a file system is read where it is decoded: the system reads ahead itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, tee, zip_longest
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.reader import InputReader, decoded
from megatron.vlm.microbatch import Microbatch
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import Size
from omnibal_ext.reading.objects import Key, forget


class Planned(NamedTuple):
    """A microbatch without what its encoders read, and the images and sounds that are to be decoded."""

    batch: Microbatch
    inputs: Mapping[Size, Sequence[Any]]


class PlannedDataset(Dataset, ABC):
    """Dataset: key -> Microbatch."""

    data: ChatDataset
    readers: Mapping[Size, InputReader]
    decodes = True

    @property
    def reads_media(self) -> bool:
        """Whether this rank decodes images or sounds."""
        return self.decodes

    @abstractmethod
    def planned(self, key: Any) -> Planned:
        """Return what a key's microbatch is, before any image is read."""

    def read(self, plan: Planned) -> Microbatch:
        """Decode what was planned. Images and sounds with placeholders are in `broken`."""
        return replace(plan.batch, **decoded(self.readers, plan.batch.media, plan.inputs, self.decodes))

    def __getitem__(self, key: Any) -> Microbatch:
        return self.read(self.planned(key))


class LookAhead(Dataset):
    """Dataset: (key, the key that this process is asked for next) -> Microbatch of the first, or the error that ends
    the run: raised in a worker it would be a traceback."""

    def __init__(self, dataset: PlannedDataset) -> None:
        self.dataset, self.begun = dataset, dict[Any, tuple[Planned, list[Key]]]()

    def __getitem__(self, keys: tuple[Any, Any]) -> Microbatch | UserError:
        key, following = keys
        try:
            plan, begun = self.begun[key] if key in self.begun else self._begin(key)
            self.begun = {} if following is None else {following: self._begin(following)}
            batch = self.dataset.read(plan)
        except UserError as error:
            return error
        for one in begun:
            forget(one)
        return batch

    def _begin(self, key: Any) -> tuple[Planned, list[Key]]:
        plan, readers = self.dataset.planned(key), self.dataset.readers
        inputs = ((readers[size], one) for size, some in plan.inputs.items() for one in some)
        return plan, [begun for reader, one in inputs for begun in reader.begin(one)]


def with_following(order: Iterable[Any], workers: int) -> Iterator[tuple[Any, Any]]:
    """Pair each key with the one that its process gets next, of so many that take turns; None: there is none."""
    keys, following = tee(order)
    return zip_longest(keys, islice(following, max(1, workers), None))
