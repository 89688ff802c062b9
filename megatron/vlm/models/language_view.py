"""What the language model's layers need to know of a pack: by which angles each token turns, and which tokens it sees.

A sample of seven tokens, three of an image (I), in a model whose tokens see the image they are of in both directions;
rows are queries, columns keys. With a window of three, a token looks back over two others at most, itself not counted.

    any distance                 window of three
      t I I I t t t                t I I I t t t
    t x                          t x
    I x x x x                    I x x x x
    I x x x x                    I x x x x
    I x x x x                    I . x x x
    t x x x x x                  t . . x x x
    t x x x x x x                t . . . x x x
    t x x x x x x x              t . . . . x x x
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.microbatch import Microbatch, Segments, segments_of
from megatron.vlm.models.rotary import Rotary
from omnibal_ext.architectures.architecture import Architecture

Span = tuple[int, int]
"""First token, and the one behind the last."""


@dataclass(frozen=True)
class Sight:
    """Of one kind of layers: angles [T, 1, 1, head width] of every token, and what it sees."""

    rotary: Tensor
    segments: Segments


@dataclass(frozen=True)
class LanguageView:
    """Of the layers that see any distance, and of those that slide a window, where there are such."""

    far: Sight
    near: Sight


class LanguageViewer(torch.nn.Module):
    """Makes the `LanguageView` of a pack. `dtype` is that of the scores, which masks are added to."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        super().__init__()
        language, self.dtype = architecture.language, dtype
        self.sliding, self.image_attention = language.sliding, language.image_attention
        self.image_tokens = architecture.image_tokens_per_tile
        native = architecture.vision.native
        self.rotary = Rotary(language, architecture.shuffle, native.positions_per_second if native else None)
        if self.sliding:
            near = replace(language, rope_theta=self.sliding.theta, rope_scaling=None)
            self.near_rotary = Rotary(near, architecture.shuffle)

    def forward(self, batch: Microbatch) -> LanguageView:
        """Rotation and segments of both kinds of layers. UserError where a sample is too long for the model."""
        images = self._images(batch) if self.image_attention else [()] * len(batch.lengths)
        far = Sight(self.rotary(batch), self._segments(batch, images, None))
        if not self.sliding:
            return LanguageView(far, far)
        near = Sight(self.near_rotary(batch), self._segments(batch, images, self.sliding.tokens))
        return LanguageView(far, near)

    def _images(self, batch: Microbatch) -> list[tuple[Span, ...]]:
        """Of each sample, where the tokens of its images are in it."""
        begins = list(accumulate(batch.lengths, initial=0))
        spans = [(start, start + self.image_tokens) for start in batch.image_starts]
        return [
            tuple((first - begin, last - begin) for first, last in spans if begin <= first and last <= end)
            for begin, end in pairwise(begins)
        ]

    def _segments(self, batch: Microbatch, images: Sequence[tuple[Span, ...]], window: int | None) -> Segments:
        if not any(images) and (window is None or max(batch.lengths) <= window):
            return batch.segments
        seen = (seen_keys(length, spans, window) for length, spans in zip(batch.lengths, images, strict=True))
        return segments_of(batch.lengths, masks=tuple(keys if keys is None else self._mask(keys) for keys in seen))

    def _mask(self, seen: Tensor) -> Tensor:
        """Zero where a query sees a key. One tensor for all layers, in the form that torch keeps and does not copy: in
        the scores' precision, rows a multiple of eight apart."""
        length = len(seen)
        mask = torch.zeros(length, -(-length // 8) * 8, dtype=self.dtype, device=seen.device)[:, :length]
        return mask.masked_fill_(~seen, -torch.inf)


def seen_keys(length: int, images: Sequence[Span], window: int | None) -> Tensor | None:
    """[length, length] whether a query (row) of a sample sees a key (column); None where it sees all up to itself."""
    if not images and (window is None or length <= window):
        return None
    image = torch.full((length,), -1)
    for number, (first, end) in enumerate(images):
        image[first:end] = number
    image, place = platform.to_device(image), torch.arange(length, device=platform.device())
    distance = place[:, None] - place
    seen = (distance >= 0) | ((image[:, None] == image) & (image >= 0))
    return seen if window is None else seen & (distance < window)
