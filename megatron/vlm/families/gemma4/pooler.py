"""Pooling of Gemma 4's patches to tokens: means of squares, and one matrix."""

import torch
from megatron.core.jit import jit_fuser
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.configs import outside_layers
from megatron.vlm.models.norm import normalised_heads
from megatron.vlm.models.vit.layers import join_rows, whole_matrix
from megatron.vlm.models.vit.native import View
from omnibal_ext.architectures.architecture import Architecture


class SquarePooler(MegatronModule):
    """A module that averages squares of patches, scales (and may shift) and normalises them; then one matrix (Gemma 4).

    This rank's rows of patches -> [squares, 1, LLM width], in the order of the images, on every tensor-parallel rank.
    """

    def __init__(self, vision: TransformerConfig, language: TransformerConfig, architecture: Architecture) -> None:
        super().__init__(outside_layers(vision))
        self.shared, self.square, self.width = vision, architecture.shuffle**2, vision.hidden_size
        self.standardized = architecture.vision.standardized
        if self.standardized:
            numbers = {"shift": torch.zeros, "scale": torch.ones}  # untrained weights: copies have them too
            for name, filled in numbers.items():
                weight = torch.nn.Parameter(filled(self.width, dtype=vision.params_dtype), requires_grad=False)
                self.register_parameter(name, weight)
        self.linear = whole_matrix(self.config, self.width, language.hidden_size, bias=False)

    def forward(self, hidden: Tensor, batch: Microbatch, view: View) -> Tensor:
        """Map this rank's rows of ViT output to image tokens [tokens, 1, LLM width]; means are scaled in fp32."""
        rows = join_rows(hidden, Images.of(batch).amount, self.shared)
        standard = (self.shift, self.scale) if self.standardized else ()
        means = _means_of_squares(rows.view(-1, self.square, 1, self.width), *standard)
        out: Tensor = self.linear(normalised_heads(means, self.shared.layernorm_epsilon))[0]
        return out


@jit_fuser
def _means_of_squares(squares: Tensor, shift: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """Average [squares, patches, 1, width], times the root of the width, shifted and scaled: [squares, 1, width]."""
    means = squares.float().mean(dim=1).to(squares.dtype).float() * squares.shape[-1] ** 0.5
    if shift is not None and scale is not None:
        means = (means - shift.float()) * scale.float()
    return means.to(squares.dtype)
