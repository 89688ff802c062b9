"""The layers of a ViT, for tiles or at native resolution."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isqrt

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.families.modules import MERGERS, PROJECTORS
from megatron.vlm.media import Images, together
from megatron.vlm.models.encoder_layers import EncoderLayers
from megatron.vlm.models.vit.layerless import NormedPatchEmbed
from megatron.vlm.models.vit.layers import PatchEmbed
from megatron.vlm.models.vit.native import NativePatchEmbed, Viewer
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.joining.positions import Grid
from omnibal_ext.modalities.modality import VISION
from omnibal_ext.modalities.vision.architecture import NativeResolution, VisionArchitecture
from omnibal_ext.modalities.vision.works import IMAGE_PATCHES


class VisionLayers(EncoderLayers):
    """The layers of a ViT: patches, layers, and one of the projectors that families have."""

    viewed = VISION.kinds

    def layers(self, model: Architecture) -> VisionArchitecture:
        """Return the ViT's sizes."""
        return model.vision

    def embed(self, config: TransformerConfig, model: Architecture) -> torch.nn.Module:
        """Build the layer from pixels to patches."""
        native = NormedPatchEmbed if model.vision.embedding_norms else NativePatchEmbed
        return (native if model.vision.native else PatchEmbed)(config, model.vision)

    def projector(self, config: TransformerConfig, language: TransformerConfig, model: Architecture) -> torch.nn.Module:
        """Build the layer from rows to image tokens."""
        known = MERGERS if model.vision.native else PROJECTORS
        return known["pooled" if model.pools else model.merger](config, language, model)

    def made_up(self, model: Architecture, units: int, lengths: Sequence[int]) -> Images:
        """Make random images of `units` tiles, or at native resolution patches in nearly square images. Their tokens
        are at the start of samples of these lengths, as many as fit."""
        grids: tuple[Grid, ...] = ()
        if model.vision.native:
            grids, starts = _images(model.vision.native, units, lengths)
            units = sum(rows * columns for _, rows, columns in grids)
        else:
            starts = _tile_starts(model.image_tokens_per_tile, units, lengths)
        tokens = torch.arange(min(sum(lengths), model.image_tokens(units)), device="cuda")
        pixels = torch.randn(units, 3, model.vision.image_size, model.vision.image_size, device="cuda")
        return Images(together(units), values=pixels, positions=tokens, sources=tokens, grids=grids, starts=starts)

    def viewer(self, config: TransformerConfig, model: Architecture) -> Viewer | None:
        """Build the viewer of patches at native resolution: their order, rotation and segments."""
        return Viewer(model.vision, config) if model.vision.native and model.vision.layers else None


def _tile_starts(per_tile: int, tiles: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the first token of each tile whose tokens are all in one sample."""
    edges = [*accumulate(lengths, initial=0)]
    starts = (tile * per_tile for tile in range(tiles))
    return tuple(start for start in starts if _fits(start, per_tile, edges))


def _fits(start: int, tokens: int, edges: Sequence[int]) -> bool:
    """Check whether so many tokens from `start` on are all in one sample."""
    return any(a <= start and start + tokens <= b for a, b in pairwise(edges))


def _images(native: NativeResolution, patches: int, lengths: Sequence[int]) -> tuple[tuple[Grid, ...], tuple[int, ...]]:
    """Return (grids, first token of each image); the pack's end from the first image on that would cross samples."""
    merge, grids, starts, left, begin, edges = native.merge, [], [], patches, 0, [*accumulate(lengths, initial=0)]
    while left >= merge**2:
        most = min(left, IMAGE_PATCHES)
        columns = isqrt(most) // merge * merge
        rows = most // columns // merge * merge
        count = rows * columns // merge**2
        grids.append((1, rows, columns))
        begin = begin if _fits(begin, count, edges) else edges[-1]
        starts.append(begin)
        left, begin = left - rows * columns, min(begin + count, edges[-1])
    return tuple(grids), tuple(starts)
