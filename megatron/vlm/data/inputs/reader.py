"""How one encoder's inputs are read; each modality has its own reader, found in `registry.READERS`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.vlm.data.dataset import ChatDataset, Sample
from megatron.vlm.media import Media
from omnibal_ext.image_assignment import Units

Broken = Mapping[int, str]
"""Sample -> error of those of which an image or a sound cannot be decoded: placeholders are in their place."""


class InputReader(ABC):
    """From samples of a dataset to the inputs of one encoder."""

    def __init__(self, data: ChatDataset) -> None:
        self.data = data

    @abstractmethod
    def media(self, samples: Sequence[Sample], begins: Sequence[int], reads_tokens: bool) -> Media:
        """What a stage has to know of a pack's inputs, without values and positions; `begins`: where samples begin in
        the sequence; `reads_tokens`: the stage does."""

    @abstractmethod
    def parts(self, samples: Sequence[Sample]) -> list[Any]:
        """All that is to be read of these samples."""

    @abstractmethod
    def read(self, media: Media, parts: Sequence[Any], decodes: bool = True) -> tuple[Media, Broken]:
        """The media with the values of these parts, on the host. Unless `decodes`, these are a meta tensor."""

    @abstractmethod
    def units(self, samples: Sequence[Sample]) -> Units:
        """The units of a pack that several ranks encode."""

    @abstractmethod
    def share(self, samples: Sequence[Sample], units: Units, encodes: Sequence[bool]) -> tuple[Media, list[Any]]:
        """What a rank encodes that takes some of these units, without values, and the parts to be read."""
