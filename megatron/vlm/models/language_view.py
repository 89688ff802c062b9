"""What the language model's layers need of a pack: the rotary angles of each token, and the tokens it attends to.

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

Where all tokens before the answer see each other (PaliGemma), they do so at any distance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.media import Images
from megatron.vlm.microbatch import HeadExchange, Microbatch, Segments, segments_of
from megatron.vlm.models.attention.rotary import Rotary
from megatron.vlm.models.attention.rotation import Rotation
from megatron.vlm.models.linear.gated_delta_net import Runs
from megatron.vlm.models.mixture.router import Balance
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.language.layer import Attention

Span = tuple[int, int]
"""First token, and the one behind the last."""


@dataclass(frozen=True)
class LanguageView:
    """Masks and rotary angles of a pack, by kind of layer."""

    seen: dict[int | None, Segments]
    """Segments, masks and rotation by the window of a layer's attention; None: full attention."""
    balance: Balance | None = None
    """Samples and weights for the balance loss of routers."""
    runs: Runs | None = None
    """Samples and chunks for linear attention."""
    words: Tensor | None = None
    """Token ids [T], for the layers' own tables."""


class LanguageViewer(torch.nn.Module):
    """A module that makes the `LanguageView` of a pack. `dtype`: of query and key, and of masks added to scores."""

    def __init__(self, architecture: Architecture, dtype: torch.dtype) -> None:
        super().__init__()
        language, self.dtype = architecture.language, dtype
        self.attentions = {attention.window: attention for attention in language.attentions}
        views = {(a.window, a.rope, a.rotary_width, a.sees_images, a.sees_prefix) for a in language.attentions}
        assert len(views) == len(self.attentions), "layers with one window turn alike, and see alike"
        self.linear, self.inputs = any(layer.linear for layer in language.each_layer), language.layer_inputs
        self.image_tokens, self.joined = architecture.image_tokens_per_tile, architecture.shuffle**2
        self.native = native = architecture.vision.native
        self.rotaries = {
            window: Rotary(attention.rope, attention.rotary_width, language.max_positions, native)
            for window, attention in self.attentions.items()
        }

    def forward(self, batch: Microbatch) -> LanguageView:
        """Compute rotation and segments of every window. Raises UserError if a sample is too long for the model."""
        masks = partial(self._masks, batch.full_pack, {})
        seen = {
            window: _seen(batch, partial(masks, attention), self.rotaries[window](batch, self.dtype))
            for window, attention in self.attentions.items()
        }
        return LanguageView(
            seen, Balance.of(batch), self._runs(batch, seen), self._words(batch) if self.inputs else None
        )

    def _runs(self, batch: Microbatch, seen: dict[int | None, Segments]) -> Runs | None:
        if not self.linear:
            return None
        plain = seen.get(None) or _seen(batch, lambda numbers: (None,) * len(numbers), None)  # no layer has attention
        return Runs.of(batch, self.dtype, plain.exchange)

    def _words(self, batch: Microbatch) -> Tensor:
        """Return the pack's token ids; image tokens have the id whose row in layers' tables is not trained."""
        assert self.inputs is not None
        assert batch.input_ids is not None
        positions = Images.of(batch).positions
        assert positions is not None
        return batch.input_ids.index_fill(0, positions, self.inputs.blank)

    def _images(self, batch: Microbatch, number: int) -> tuple[Span, ...]:
        """Return the spans of a sample's images, whose tokens attend to each other in both directions."""
        begin, images = sum(batch.lengths[:number]), Images.of(batch)
        starts = images.starts
        counts = [self.image_tokens] * len(starts)
        if self.native:
            counts = [steps * rows * columns // self.joined for steps, rows, columns in images.grids]
        spans = [(start - begin, start - begin + count) for start, count in zip(starts, counts, strict=False)]
        return tuple(span for span in spans if span[0] >= 0 and span[1] <= batch.lengths[number])

    def _prefix(self, batch: Microbatch, number: int) -> int:
        """Return the number of tokens at the start of a sample that attend to each other both ways; 0 for padding."""
        return batch.prefixes[number] if number < len(batch.prefixes) else 0

    def _masks(
        self, batch: Microbatch, made: dict[Any, Tensor | None], attention: Attention, numbers: Sequence[int]
    ) -> tuple[Tensor | None, ...]:
        """Return masks of these samples of a pack; equal ones are made once, also for several windows."""
        found = []
        for number in numbers:
            length = batch.lengths[number]
            reach = length if attention.window is None else min(attention.window, length)
            images = self._images(batch, number) if attention.sees_images else ()
            prefix = self._prefix(batch, number) if attention.sees_prefix else 0
            how = (length, images, reach, prefix, attention.images_whole)
            if (number, *how) not in made:
                made[number, *how] = self._mask(*how)
            found.append(made[number, *how])
        return tuple(found)

    def _mask(self, length: int, images: Sequence[Span], window: int, prefix: int, whole: bool) -> Tensor | None:
        """Make a mask, zero where a query sees a key, -inf elsewhere. All layers share it, in the form that torch keeps
        and does not copy: in the scores' precision, rows a multiple of eight apart."""
        seen = seen_keys(length, images, window, prefix, whole)
        if seen is None:
            return None
        mask = torch.zeros(length, -(-length // 8) * 8, dtype=self.dtype, device=seen.device)[:, :length]
        return mask.masked_fill_(~seen, -torch.inf)


def _seen(
    batch: Microbatch, masks: Callable[[Sequence[int]], tuple[Tensor | None, ...]], rotation: Rotation | None
) -> Segments:
    """Return the segments of a pack or of this rank's shard; `masks` makes the masks of samples by their numbers."""
    share = batch.shard
    if share is None or not share.split.samples:
        found = masks(range(len(batch.lengths)) if share is None else share.segments)
        if all(mask is None for mask in found):
            return replace(batch.segments, rotation=rotation)
        return segments_of(batch.lengths, masks=found, rotation=rotation)
    assert share.team is not None
    cut = share.split
    together = segments_of(cut.lengths, masks=masks(cut.samples))
    exchange = HeadExchange(cut.rows, cut.order, share.team_rank, share.team, together)
    first = share.split_segments
    own = segments_of(batch.lengths[first:], masks=masks(share.segments[first:]), rotation=rotation)
    return replace(own, exchange=exchange)


def seen_keys(
    length: int, images: Sequence[Span], window: int | None, prefix: int = 0, images_whole: bool = False
) -> Tensor | None:
    """Return [length, length], true where a query (row) sees a key (column); None where it sees all up to itself.

    Tokens of one image also see those behind them; with `images_whole`, or among the first `prefix` tokens, also those
    before at any distance, past `window`.
    """
    if not images and prefix < 2 and (window is None or length <= window):
        return None
    image = torch.full((length,), -1)
    for number, (first, end) in enumerate(images):
        image[first:end] = number
    image, position = platform.to_device(image), torch.arange(length, device=platform.device())
    distance = position[:, None] - position
    together = (image[:, None] == image) & (image >= 0)
    seen = (distance >= 0) | together
    seen = seen if window is None else seen & (distance < window)
    seen = seen | together if images_whole else seen
    return seen | ((position[:, None] < prefix) & (position < prefix))
