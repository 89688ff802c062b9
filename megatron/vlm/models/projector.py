"""From the ViT's width to the language model's: pixel shuffle and a two-layer perceptron (InternVL)."""

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.norm import build_norm
from omnibal_ext.architectures import Architecture


class Projector(torch.nn.Module):
    """[1 + patches, tiles, ViT width] -> [tiles * image tokens, 1, LLM width]; the class token is dropped."""

    def __init__(self, vision: TransformerConfig, language: TransformerConfig, architecture: Architecture) -> None:
        super().__init__()
        self.shuffle = architecture.shuffle
        width = vision.hidden_size * self.shuffle**2
        linear = {"config": vision, "init_method": vision.init_method, "bias": True, "skip_bias_add": False}
        self.norm = build_norm(_layer_norm(vision), width)
        self.linear_fc1 = ColumnParallelLinear(width, language.hidden_size, gather_output=False, **linear)
        self.linear_fc2 = RowParallelLinear(
            language.hidden_size, language.hidden_size, input_is_parallel=True, **linear
        )

    def forward(self, hidden: Tensor, batch: Microbatch) -> Tensor:
        image = pixel_shuffle(hidden[1:].transpose(0, 1), self.shuffle)
        inner, _ = self.linear_fc1(self.norm(image))
        out, _ = self.linear_fc2(gelu(inner))
        return out.reshape(-1, 1, out.shape[-1])


def pixel_shuffle(patches: Tensor, factor: int) -> Tensor:
    """Gather each `factor` x `factor` square of patches into one token.

    patches [tiles, side * side, width] -> [tiles, (side / factor)^2, factor^2 * width], channels ordered as InternVL's.
    """
    tiles, count, width = patches.shape
    side = int(count**0.5)
    squares = patches.reshape(tiles, side // factor, factor, side // factor, factor, width)
    return squares.permute(0, 1, 3, 2, 4, 5).reshape(tiles, (side // factor) ** 2, factor**2 * width)


def _layer_norm(config: TransformerConfig) -> TransformerConfig:
    """The projector's norm is a LayerNorm, whatever the ViT's layers use."""
    from copy import copy

    config = copy(config)
    config.normalization = "LayerNorm"
    return config
