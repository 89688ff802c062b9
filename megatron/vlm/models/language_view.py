"""What the language model's layers need to know of a pack: by which angles each token turns, which tokens it sees.

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
from megatron.vlm.models.linear.gated_delta_net import Runs
from megatron.vlm.models.mixture.router import Balance
from megatron.vlm.models.rotary import Rotary
from megatron.vlm.models.rotation import Rotation
from omnibal_ext.architectures.architecture import Architecture

Span = tuple[int, int]
"""First token, and the one behind the last."""


@dataclass(frozen=True)
class LanguageView:
    """Of the layers that see any distance, and of those that slide a window, where there are such: what tokens see, and
    by which angles they turn."""

    far: Segments
    near: Segments
    balance: Balance | None = None
    """Of the routers of experts."""
    runs: Runs | None = None
    """Of the layers of linear attention."""


class LanguageViewer(torch.nn.Module):
    """Makes the `LanguageView` of a pack. `dtype` is that of query and key, and of scores, which masks are added to."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        super().__init__()
        language, self.dtype = architecture.language, dtype
        self.sliding, self.image_attention = language.sliding, language.image_attention
        self.linear = language.linear
        self.image_tokens = architecture.image_tokens_per_tile
        native = architecture.vision.native
        self.rotary = Rotary(language, architecture.shuffle, native.positions_per_second if native else None)
        if self.sliding:
            near = replace(language, rope_theta=self.sliding.theta, rope_scaling=None)
            self.near_rotary = Rotary(near, architecture.shuffle)

    def forward(self, batch: Microbatch) -> LanguageView:
        """Rotation and segments of both kinds of layers. UserError where a sample is too long for the model."""
        samples = [*zip(batch.lengths, self._images(batch), strict=True)]
        masks = [self._mask(length, images, None) for length, images in samples]
        far, balance = _segments(batch, masks, self.rotary(batch, self.dtype)), Balance.of(batch)
        if not self.sliding:
            return LanguageView(far, far, balance, Runs.of(batch, self.dtype) if self.linear else None)
        window = self.sliding.tokens
        nearer = [
            mask if length <= window else self._mask(length, images, window)
            for (length, images), mask in zip(samples, masks, strict=True)
        ]
        near = _segments(batch, nearer, self.near_rotary(batch, self.dtype))
        return LanguageView(far, near, balance)

    def _images(self, batch: Microbatch) -> list[tuple[Span, ...]]:
        """Of each sample, where in it are the tokens of its images that see each other."""
        begins = [*accumulate(batch.lengths, initial=0)]
        starts = batch.image_starts if self.image_attention else ()
        spans = [(start, start + self.image_tokens) for start in starts]
        return [
            tuple((first - begin, last - begin) for first, last in spans if begin <= first and last <= end)
            for begin, end in pairwise(begins)
        ]

    def _mask(self, length: int, images: Sequence[Span], window: int | None) -> Tensor | None:
        """Zero where a query sees a key. One tensor for all layers, in the form that torch keeps and does not copy: in
        the scores' precision, rows a multiple of eight apart."""
        seen = seen_keys(length, images, window)
        if seen is None:
            return None
        mask = torch.zeros(length, -(-length // 8) * 8, dtype=self.dtype, device=seen.device)[:, :length]
        return mask.masked_fill_(~seen, -torch.inf)


def _segments(batch: Microbatch, masks: Sequence[Tensor | None], rotation: Rotation) -> Segments:
    if all(mask is None for mask in masks):
        return replace(batch.segments, rotation=rotation)
    return segments_of(batch.lengths, masks=tuple(masks), rotation=rotation)


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
