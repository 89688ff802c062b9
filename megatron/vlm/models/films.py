"""Layers of an encoder of videos: a ViT for tiles, whose rows another encoder's projector makes tokens of."""

from collections.abc import Sequence

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.media import Images, together
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.encoder_layers import EncoderLayers
from megatron.vlm.models.vit.layers import PatchEmbed, join_rows
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.film.architecture import FilmArchitecture
from omnibal_ext.modalities.modality import FILM
from omnibal_ext.modalities.vision.architecture import VisionArchitecture


class FilmRows(MegatronModule):
    """The layer from this rank's rows, token by token, to all rows, frame after frame, on every tensor-parallel
    rank."""

    def __init__(self, config: TransformerConfig, tokens: int) -> None:
        """Keep `tokens`, the ViT tokens of a frame."""
        super().__init__(config)
        self.tokens = tokens

    def forward(self, hidden: Tensor, batch: Microbatch) -> Tensor:
        """Gather and reorder rows, [rows here, 1, width] -> [rows, 1, width]."""
        frames = batch.media_of(FILM.size).amount
        rows = join_rows(hidden, self.tokens * frames, self.config)
        return rows.view(self.tokens, frames, -1).transpose(0, 1).reshape(-1, 1, rows.shape[-1])


class FilmLayers(EncoderLayers):
    """The layers of a video encoder: patches of frames, a ViT, and rows in the order of their tokens."""

    def layers(self, model: Architecture) -> VisionArchitecture:
        """Return the sizes of the ViT that encodes the frames."""
        return FilmArchitecture.among(model.further).as_vit

    def embed(self, config: TransformerConfig, model: Architecture) -> torch.nn.Module:
        """Build the layer from pixels to patches."""
        return PatchEmbed(config, self.layers(model), FILM.size)

    def projector(self, config: TransformerConfig, language: TransformerConfig, model: Architecture) -> torch.nn.Module:
        """Build the layer that orders rows by frame."""
        return FilmRows(config, self.layers(model).tokens_per_tile)

    def made_up(self, model: Architecture, units: int, lengths: Sequence[int]) -> Images:
        """Make a random video of `units` frames. Its tokens are at the end of samples of these lengths, several at one
        position if they are more than the pack's."""
        vision, tokens = self.layers(model), sum(lengths)
        rows = torch.arange(vision.rows(units), device=platform.device())
        pixels = torch.randn(units, 3, vision.image_size, vision.image_size, device=rows.device)
        return Images(together(units), values=pixels, positions=tokens - 1 - rows % tokens)
