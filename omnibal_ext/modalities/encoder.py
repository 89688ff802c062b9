"""A model's encoder as a value: what chain, flow and sizes of packs follow from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Self

from omnibal_ext.modalities.modality import Modality


@dataclass(frozen=True)
class Features:
    """Outputs of an encoder's layers that go to its projector in addition to the last one's; what this does with
    them."""

    layers: tuple[int, ...] = ()
    """Numbers of the layers, ascending."""
    joined: bool = False
    """The projector concatenates them; else it makes tokens of each, and the n-th are added after the n-th language
    layer (DeepStack, arXiv 2406.04334)."""

    @property
    def streams(self) -> int:
        """How many tensors of tokens leave the projector: hidden states, and features that layers add later."""
        return 1 if self.joined else 1 + len(self.layers)


@dataclass(frozen=True)
class Encoder:
    """What makes LLM tokens of one modality's inputs, as chain, extras and sizes of packs need it."""

    modality: Modality
    layers: tuple[Hashable, ...]
    """A value for each layer between embedding and projector; equal ones have the same matrices and costs."""
    rows: Callable[[int], int]
    """Rows that the layers see of one input (an image, a sound) of so many units of the modality's size."""
    tokens: Callable[[int], int]
    """Tokens of the language model of one input of so many units."""
    features: Features = Features()
    period: int = 1
    """Units of one input after which the pattern of attention of its rows repeats: costs are counted for so many."""


@dataclass(frozen=True)
class EncoderArchitecture(ABC):
    """The sizes of an encoder whose layers are like a ViT's; each modality has its dataclass of this kind."""

    layers: int
    hidden_size: int
    heads: int
    ffn_hidden_size: int

    @property
    @abstractmethod
    def encoder(self) -> Encoder:
        """The encoder as chain, extras and sizes of packs need it."""

    @property
    def modality(self) -> Modality:
        """The modality whose inputs it reads."""
        return self.encoder.modality

    @classmethod
    def among(cls, further: Iterable["EncoderArchitecture"]) -> Self:
        """Return the encoder of this class among those that a model has besides its ViT; one must be there."""
        return next(one for one in further if isinstance(one, cls))
