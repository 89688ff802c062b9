"""Projector of Gemma 3: average squares of patches, a norm, one matrix."""

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.configs import outside_layers
from megatron.vlm.models.norm import build_norm
from megatron.vlm.models.vit.layers import join_rows, whole_matrix
from omnibal_ext.architectures.architecture import Architecture


class PooledProjector(MegatronModule):
    """A module from ViT tokens to image tokens: the mean of each square of patches, a norm, one matrix (Gemma 3)."""

    def __init__(self, vision: TransformerConfig, language: TransformerConfig, architecture: Architecture) -> None:
        super().__init__(outside_layers(vision))
        self.shared, width, epsilon = vision, vision.hidden_size, architecture.vision.norm_epsilon
        self.tokens_per_tile, self.square = architecture.vision.tokens_per_tile, architecture.shuffle
        self.vision_norm = build_norm(self.config, width, epsilon, "LayerNorm")
        self.norm = build_norm(self.config, width, epsilon, "CentredRMSNorm")
        self.linear = whole_matrix(self.config, width, language.hidden_size, bias=False)

    def forward(self, hidden: Tensor, batch: Microbatch) -> Tensor:
        """Map this rank's rows of ViT tokens to image tokens [tokens, 1, LLM width], tile after tile, on every rank."""
        tiles = Images.of(batch).amount
        rows = join_rows(hidden, self.tokens_per_tile * tiles, self.shared)
        patches = self.vision_norm(rows.view(self.tokens_per_tile, tiles, -1)).transpose(0, 1)
        out, _ = self.linear(self.norm(mean_of_squares(patches, self.square)))
        return out.reshape(-1, 1, out.shape[-1])


def mean_of_squares(patches: Tensor, side: int) -> Tensor:
    """Average each `side` x `side` square: patches [tiles, n * n, width] -> [tiles, (n / side)^2, width]."""
    tiles, count, width = patches.shape
    squares = int(count**0.5) // side
    return patches.reshape(tiles, squares, side, squares, side, width).mean(dim=(2, 4)).flatten(1, 2)
