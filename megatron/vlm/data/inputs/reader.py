"""How one encoder's inputs are read; each modality has its own reader, found in `registry.READERS`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.vlm.data.dataset import ChatDataset, Sample
from megatron.vlm.media import Media
from omnibal_ext.image_assignment import Units
from omnibal_ext.modalities.modality import Size

Broken = Mapping[int, str]
"""Sample -> error of those of which an image or a sound cannot be decoded: placeholders are in their place."""


class InputReader(ABC):
    """From samples of a dataset to the inputs of one encoder."""

    def __init__(self, data: ChatDataset) -> None:
        self.data = data

    @abstractmethod
    def media(self, samples: Sequence[Sample], begins: Sequence[int], reads_tokens: bool) -> Media:
        """Return what every stage must know of a pack's inputs, without values and positions.

        `begins`: index of each sample's first token in the sequence. `reads_tokens`: whether the stage reads tokens.
        """

    @abstractmethod
    def parts(self, samples: Sequence[Sample]) -> list[Any]:
        """List the images or sounds of these samples, to be decoded."""

    @abstractmethod
    def read(self, media: Media, parts: Sequence[Any], decodes: bool = True) -> tuple[Media, Broken]:
        """Decode these parts: return the media with their values, on the host. Unless `decodes`, values are a meta
        tensor of the same shape."""

    @abstractmethod
    def units(self, samples: Sequence[Sample]) -> Units:
        """Divide the inputs of a pack that several ranks encode into units, which a rank encodes whole."""

    @abstractmethod
    def share(self, samples: Sequence[Sample], units: Units, encodes: Sequence[bool]) -> tuple[Media, list[Any]]:
        """Return the media of a rank that encodes some of these units, without values, and the parts to decode."""


def decoded(
    readers: Mapping[Size, InputReader],
    media: Mapping[Size, Media],
    parts: Mapping[Size, Sequence[Any]],
    decodes: bool = True,
) -> dict[str, Any]:
    """Decode the parts of each size: return `media` with their values, and `broken`, as fields of a `Microbatch`."""
    found, broken = dict(media), dict[int, str]()
    for size, some in parts.items():
        found[size], faults = readers[size].read(found[size], some, decodes)
        broken = {**faults, **broken}
    return {"media": found, "broken": tuple(broken.items())}
