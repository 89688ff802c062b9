"""Projectors from the ViT's width to the language model's.

A two-layer perceptron (LLaVA), after a pixel shuffle (InternVL), or of several ViT layers' concatenated outputs
(ViP-LLaVA); or one matrix after a pixel shuffle (Idefics 3) or of single patches (PaliGemma).
"""

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu

from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.configs import outside_layers
from megatron.vlm.models.norm import build_norm
from megatron.vlm.models.vit.layers import join_rows
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.modality import VISION


class Projector(MegatronModule):
    """The perceptron: this rank's rows of ViT tokens -> [tiles * image tokens, 1, LLM width], on every rank."""

    def __init__(self, vision: TransformerConfig, language: TransformerConfig, architecture: Architecture) -> None:
        super().__init__(outside_layers(vision))
        self.shared, vision = vision, self.config
        self.tokens_per_tile = architecture.vision.tokens_per_tile
        self.side_by_side = architecture.vision.side_by_side
        self.shuffle = architecture.shuffle
        self.first = int(architecture.vision.class_token and not architecture.class_token)
        self.others = len(architecture.projected_with(VISION))
        width = architecture.joined_width
        linear = {"config": vision, "init_method": vision.init_method, "bias": architecture.projector_bias}
        self.vision_norm: torch.nn.Module = torch.nn.Identity()
        self.norm: torch.nn.Module = torch.nn.Identity()
        if architecture.vision.final_norm:
            self.vision_norm = build_norm(vision, vision.hidden_size, architecture.vision.norm_epsilon, "LayerNorm")
        if architecture.projector_norm:
            self.norm = build_norm(vision, width, kind="LayerNorm")
        self.linear_fc1 = ColumnParallelLinear(width, language.hidden_size, gather_output=False, **linear)
        self.linear_fc2 = RowParallelLinear(
            language.hidden_size, language.hidden_size, input_is_parallel=True, skip_bias_add=False, **linear
        )

    def forward(self, hidden: Tensor, batch: Microbatch, *features: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Map this rank's rows of ViT tokens to image tokens [tokens, 1, LLM width], tile after tile.

        `features`: rows of other encoders [rows, 1, width], whose tokens are returned behind the images'; and outputs
        of earlier layers; those in `side_by_side` are concatenated along the width.
        """
        others, features = features[: self.others], features[self.others :]
        if self.side_by_side:
            given = (*features, hidden)
            hidden = torch.cat([given[number] for number in self.side_by_side], dim=-1)
        tiles = Images.of(batch).amount
        rows = join_rows(hidden, self.tokens_per_tile * tiles, self.shared) if tiles else hidden
        tokens = rows.view(self.tokens_per_tile, tiles, rows.shape[-1])
        image = self.vision_norm(tokens)[self.first :].transpose(0, 1)
        if self.shuffle > 1:
            image = pixel_shuffle(image, self.shuffle)
        if others:
            image = torch.cat([image.reshape(-1, 1, image.shape[-1]), *others])
        inner, _ = self.linear_fc1(self.norm(image))
        out, _ = self.linear_fc2(gelu(inner))
        out = out.reshape(-1, 1, out.shape[-1])
        lengths = [*map(len, others)]
        return out.split([len(out) - sum(lengths), *lengths]) if others else out


class ShuffledProjector(MegatronModule):
    """The matrix after a pixel shuffle: this rank's rows of ViT tokens -> [tiles * image tokens, 1, LLM width]."""

    def __init__(self, vision: TransformerConfig, language: TransformerConfig, architecture: Architecture) -> None:
        super().__init__(outside_layers(vision))
        self.shared, epsilon = vision, architecture.vision.norm_epsilon
        self.tokens_per_tile, self.shuffle = architecture.vision.tokens_per_tile, architecture.shuffle
        self.vision_norm = build_norm(self.config, vision.hidden_size, epsilon, "LayerNorm")
        self.linear = ColumnParallelLinear(
            architecture.joined_width, language.hidden_size, config=self.config, init_method=vision.init_method,
            bias=architecture.projector_bias, gather_output=False,
        )  # fmt: skip

    def forward(self, hidden: Tensor, batch: Microbatch) -> Tensor:
        """Map this rank's rows of ViT tokens to image tokens [tokens, 1, LLM width], tile after tile."""
        tiles = Images.of(batch).amount
        rows = join_rows(hidden, self.tokens_per_tile * tiles, self.shared)
        patches = self.vision_norm(rows.view(self.tokens_per_tile, tiles, -1)).transpose(0, 1)
        part, _ = self.linear(pixel_shuffle(patches, self.shuffle))
        out = gather_from_tensor_model_parallel_region(part)  # behind adapters, which add to a rank's part
        return out.reshape(-1, 1, out.shape[-1])


def pixel_shuffle(patches: Tensor, factor: int) -> Tensor:
    """Gather each `factor` x `factor` square of patches into one token.

    patches [tiles, side * side, width] -> [tiles, (side / factor)^2, factor^2 * width], channels ordered as InternVL's.
    """
    tiles, count, width = patches.shape
    side = int(count**0.5)
    squares = patches.reshape(tiles, side // factor, factor, side // factor, factor, width)
    return squares.permute(0, 1, 3, 2, 4, 5).reshape(tiles, (side // factor) ** 2, factor**2 * width)
