"""What the encoders read of a pack: a `Media` for each, in `Microbatch.media`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain, compress
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from megatron.vlm.pixels import PixelStatistics, normalise
from megatron.vlm.platform import to_device
from omnibal_ext.image_assignment import Pieces
from omnibal_ext.joining.positions import Grid
from omnibal_ext.modalities.modality import VISION, Size

Holder = TypeVar("Holder", bound=Any)


def with_tensors(holder: Holder, change: Callable[[Tensor], Tensor | None]) -> Holder:
    """Return a copy of a dataclass with `change` applied to each field that holds a tensor."""
    found = {one.name: getattr(holder, one.name) for one in fields(holder)}
    changed = {name: change(value) for name, value in found.items() if isinstance(value, Tensor)}
    return replace(holder, **changed) if changed else holder


def together(size: int) -> Pieces:
    """Return `Media.pieces` where one rank encodes all `size` tiles, patches or frames, as one input; () for 0."""
    return ((size,),) if size else ()


@dataclass(frozen=True)
class Media:
    """Inputs of one encoder, such as mel frames of sounds. A stage gets only the tensors that its layers need."""

    pieces: Pieces = ()
    """Size of each input, by piece (what one rank encodes whole): of the pack, or of this rank's shard."""
    encodes: tuple[bool, ...] = ()
    """Whether this rank encodes each piece; (): it encodes all."""
    values: Tensor | None = None
    """What the encoder reads of the inputs here, end to end: fp32 [frames, mel bins]."""
    positions: Tensor | None = None
    """int64 [tokens], into input_ids: where the encoder's tokens go."""

    @cached_property
    def kept(self) -> Pieces:
        """Pieces that this rank encodes."""
        return tuple(compress(self.pieces, self.encodes)) if self.encodes else self.pieces

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """Size of each input that this rank encodes, in tiles, patches or frames."""
        return tuple(chain.from_iterable(self.kept))

    @cached_property
    def amount(self) -> int:
        """Tiles or mel frames of all inputs that this rank encodes."""
        return sum(self.inputs)

    @cached_property
    def encoded_pieces(self) -> Tensor:
        """int64, on this rank's device: numbers of the pieces that it encodes."""
        return to_device(torch.tensor([number for number, here in enumerate(self.encodes) if here]))

    def placed(self, words: Tensor, tokens: Tensor) -> Tensor:
        """Return rows of the sequence [T, width] with the encoder's tokens [tokens, width] in their places."""
        assert self.positions is not None
        return words.index_copy(0, self.positions, tokens.to(words.dtype))

    def arrived(self, send: Callable[[Tensor], Tensor]) -> Self:
        """Return the media with values as the encoder reads them; `send`: from the tensor-parallel rank that has read
        them to the others."""
        return self if self.values is None else replace(self, values=send(self.values))


NO_MEDIA = Media()


@dataclass(frozen=True)
class Images(Media):
    """The images and videos of a pack: inputs are tiles or patches.

    `values`: fp32 [tiles, 3, size, size], with videos [tiles, 3, frames, size, size]; while `statistics` are there,
    uint8 [tiles, size, size, 3] or [tiles, frames, size, size, 3].
    """

    statistics: PixelStatistics | None = None
    """Statistics to normalise the pixels that were read."""
    sources: Tensor | None = None
    """int64 [tokens] or [tokens, 4], of projected tokens, -1: a newline; None: in order."""
    weights: Tensor | None = None
    """[tokens, 4], with 4 sources: their weights in a token."""
    grids: tuple[Grid, ...] = ()
    """Grids of every image at native resolution, in order."""
    starts: tuple[int, ...] = ()
    """First token of each image, if the model needs it."""
    seconds: tuple[float, ...] = ()
    """Seconds between two temporal steps of each of `grids`; (): no video."""
    turns: tuple[tuple[int, ...], ...] = ()
    """Alternating runs, for each of `grids`, of a video's tokens and its sound's; (): no video is heard."""

    @classmethod
    def of(cls, pack: "HasMedia") -> "Images":
        """Return the images and videos of a pack; `NO_IMAGES` if it has none."""
        found = pack.media.get(VISION.size, NO_IMAGES)
        assert isinstance(found, cls)
        return found

    def arrived(self, send: Callable[[Tensor], Tensor]) -> Self:
        """Return the images with normalised pixels."""
        if self.values is None or self.statistics is None:
            return self
        return replace(self, values=normalise(send(self.values), self.statistics), statistics=None)


class HasMedia(Protocol):
    """Protocol of a microbatch, as far as its media go."""

    @property
    def media(self) -> Mapping[Size, Media]:
        """What each encoder reads."""


NO_IMAGES = Images()
