"""Reading of one encoder's inputs; each modality has its own reader, found in `registry.READERS`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron.vlm.data.dataset_folder import DatasetFolder
from megatron.vlm.data.media.crc import begin, compare, is_exact
from megatron.vlm.data.media.tile_cache import KeptTiles
from megatron.vlm.data.sample import Sample
from megatron.vlm.media import Media
from omnibal_ext.errors import UserError
from omnibal_ext.image_assignment import Pieces
from omnibal_ext.modalities.modality import Modality, Size
from omnibal_ext.modalities.place import Mark
from omnibal_ext.reading.objects import Key
from omnibal_ext.reading.stores import raise_if_lost

Read = TypeVar("Read")
Broken = Mapping[int, str]
"""Sample -> error, for samples with an image or sound that cannot be decoded: placeholders are in their place."""


class Input(NamedTuple):
    """An input of a pack, such as a sound, with its sample."""

    sample: Sample
    item: Any


class Cut(NamedTuple):
    """How an input is cut into tiles, uint8: by which rule, and their shape."""

    rule: str
    shape: tuple[int, ...]


def _marks(root: Path, path: Path, item: Any) -> dict[Path, Mark | None]:
    """Return the files of an input, and what is noted of each."""
    paths = [root / file for file in item.files] or [path]
    return dict(zip(paths, item.crcs or [None] * len(paths), strict=True))


def _compare(root: Path, path: Path, item: Any) -> None:
    for file, mark in _marks(root, path, item).items():
        compare(file, item.place, mark)


def read_each(
    inputs: Sequence[Any], read: Callable[[Any], Read], placeholder: Callable[[Any], Read]
) -> tuple[list[Read], Broken]:
    """Read inputs, each with its `sample`; in place of one that cannot be read put its `placeholder`, whose shape the
    other ranks expect."""
    found, broken = list[Read](), dict[int, str]()
    for one in inputs:
        try:
            found.append(read(one))
        except UserError as error:
            raise_if_lost()
            broken.setdefault(one.sample.number, str(error))
            found.append(placeholder(one))
    return found, broken


class InputReader(ABC):
    """A reader of one encoder's inputs from samples of a dataset."""

    modality: ClassVar[Modality]

    def __init__(self, data: DatasetFolder) -> None:
        self.data = data

    @abstractmethod
    def require(self) -> None:
        """Raise UserError naming what to install where inputs that the dataset has cannot be read."""

    def decode(self, sample: Sample, item: Any) -> Any:
        """Decode one input of a sample, or take its tiles from the cache: an array or a tensor [units, ...].

        Raises `UserError` naming file and sample if it cannot be, or is not what was preprocessed.
        """
        root, path = sample.file(item)
        with sample.decoding(path):
            item = item if self.data.checks_images else replace(item, crcs=())
            decoded, kept = partial(self._decoded, root, path, item), self._kept(root, path, item)
            return decoded() if kept is None else kept.tiles(partial(_compare, root, path, item), decoded)

    def _kept(self, root: Path, path: Path, item: Any) -> KeptTiles | None:
        """Return the cache's tiles of an input; None: it keeps none."""
        cache = self.data.tile_cache
        if cache is None or (cut := self._cut(item)) is None:
            return None
        if not all(is_exact(*file) for file in _marks(root, path, item).items()):
            return None
        return cache.of((cut.rule, str(root), str(path), item), cut.shape)

    @abstractmethod
    def _decoded(self, root: Path, path: Path, item: Any) -> Any:
        """Decode an input that lies at `path`, or whose files lie below `root`, and is compared with its marks."""

    def _cut(self, item: Any) -> Cut | None:
        """Return how an input is cut into tiles; None: it is not."""
        return None

    @abstractmethod
    def values(self, sample: Sample, item: Any) -> Tensor:
        """Decode one input of a sample as its encoder reads it: fp32 [units, ...]. Raises as `decode`."""

    @abstractmethod
    def decode_all(self, sample: Sample) -> Any:
        """Decode all inputs of a sample, end to end: [units, ...]."""

    @abstractmethod
    def arguments(self, sample: Sample) -> dict[str, Any]:
        """Decode a sample's inputs of this modality; return them as fields of a `ChatDataset` sample, by name."""

    @abstractmethod
    def media(self, samples: Sequence[Sample], begins: Sequence[int], reads_tokens: bool) -> Media:
        """Return what every stage must know of a pack's inputs, without values and positions.

        `begins`: index of each sample's first token in the sequence. `reads_tokens`: whether the stage reads tokens.
        """

    def begin(self, one: Any) -> list[Key]:
        """Begin to read the files of an image or a sound that lie in a store, ahead of `read`."""
        sample, item = one[:2]
        root, path = sample.file(item)
        kept, files = self._kept(root, path, item), _marks(root, path, item)
        is_kept = kept is not None and kept.are_there
        begun = (begin(file, item.place, mark, is_kept) for file, mark in files.items())
        return [key for key in begun if key is not None]

    def inputs(self, samples: Sequence[Sample]) -> list[Any]:
        """List the images or sounds of these samples, not decoded yet."""
        return [Input(sample, item) for sample in samples for item in sample.items(self.modality)]

    @abstractmethod
    def read(self, media: Media, inputs: Sequence[Any], decodes: bool = True) -> tuple[Media, Broken]:
        """Decode these inputs: return the media with their values, on the host, and errors by sample. Unless `decodes`,
        values are a meta tensor of the same shape."""

    @abstractmethod
    def pieces(self, samples: Sequence[Sample]) -> Pieces:
        """Divide a pack's inputs into pieces, each encoded whole by one rank: return their sizes (tiles, frames)."""

    @abstractmethod
    def share(self, samples: Sequence[Sample], pieces: Pieces, encodes: Sequence[bool]) -> tuple[Media, list[Any]]:
        """Return the media of a rank that encodes the pieces true in `encodes`, without values; and its inputs."""


class RowReader(InputReader):
    """Inputs that are rows of numbers, such as a sound's mel frames. Those of a sample are encoded on one rank: some
    encoders pad each to the longest."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of columns of a row."""

    def values(self, sample: Sample, item: Any) -> Tensor:
        """Decode one input: fp32 [rows, width], as `decode` does."""
        found: Tensor = self.decode(sample, item)
        return found

    def decode_all(self, sample: Sample) -> Tensor:
        """Decode all inputs of a sample, end to end: fp32 [rows, width]."""
        found = (self.decode(sample, item) for item in sample.items(self.modality))
        return torch.cat([torch.zeros(0, self.width), *found])

    def media(self, samples: Sequence[Sample], begins: Sequence[int], reads_tokens: bool) -> Media:
        """Return a pack's inputs without values: the number of rows of each."""
        return Media(self.pieces(samples))

    def read(self, media: Media, inputs: Sequence[Input], decodes: bool = True) -> tuple[Media, Broken]:
        """Decode the inputs: values are fp32 [rows, width]."""
        if not decodes or not media.amount:
            return replace(media, values=torch.empty(media.amount, self.width, device="meta")), {}
        read, broken = read_each(
            inputs, lambda one: self.decode(*one), lambda one: torch.zeros(one.item.units, self.width)
        )
        return replace(media, values=torch.cat(read)), broken

    def pieces(self, samples: Sequence[Sample]) -> Pieces:
        """Return the number of rows of each input, a piece for each sample; () if there are no inputs."""
        found = tuple(tuple(item.units for item in sample.items(self.modality)) for sample in samples)
        return found if any(found) else ()

    def share(self, samples: Sequence[Sample], pieces: Pieces, encodes: Sequence[bool]) -> tuple[Media, list[Input]]:
        """Return the media of a rank that encodes the samples true in `encodes`; and their inputs, to be decoded."""
        return Media(pieces, tuple(encodes)), self.inputs([*compress(samples, encodes)])


def decoded(
    readers: Mapping[Size, InputReader],
    media: Mapping[Size, Media],
    inputs: Mapping[Size, Sequence[Any]],
    decodes: bool = True,
) -> dict[str, Any]:
    """Decode each encoder's inputs, by `Size`: return `media` with values and `broken`, fields of a `Microbatch`."""
    found, broken = dict(media), dict[int, str]()
    for size, some in inputs.items():
        found[size], faults = readers[size].read(found[size], some, decodes)
        broken = {**faults, **broken}
    return {"media": found, "broken": tuple(broken.items())}
