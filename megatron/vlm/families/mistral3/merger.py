"""Merger of Pixtral's patches to tokens: norm, matrix [square -> patch], GELU perceptron of two layers."""

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu

from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.configs import outside_layers
from megatron.vlm.models.norm import build_norm
from megatron.vlm.models.vit.layers import join_rows, whole_matrix
from megatron.vlm.models.vit.native import View
from omnibal_ext.architectures.architecture import Architecture


class MatrixMerger(MegatronModule):
    """A module from squares of patches to image tokens, in the order of the images (Mistral 3)."""

    def __init__(self, vision: TransformerConfig, language: TransformerConfig, architecture: Architecture) -> None:
        super().__init__(outside_layers(vision))
        self.shared, width, out = vision, vision.hidden_size, language.hidden_size
        self.width = architecture.joined_width
        linear: dict[str, Any] = {"config": self.config, "init_method": vision.init_method}
        linear["bias"] = architecture.projector_bias
        self.norm = build_norm(self.config, width, architecture.language.norm_epsilon, "RMSNorm")
        self.merge = whole_matrix(self.config, self.width, width, bias=False)
        self.linear_fc1 = ColumnParallelLinear(width, out, gather_output=False, **linear)
        self.linear_fc2 = RowParallelLinear(out, out, input_is_parallel=True, skip_bias_add=False, **linear)

    def forward(self, hidden: Tensor, batch: Microbatch, view: View) -> Tensor:
        """Map this rank's rows of ViT output to the image tokens of the pack, [tokens, 1, LLM width], on every rank."""
        patches = self.norm(join_rows(hidden, Images.of(batch).amount, self.shared))
        merged, _ = self.merge(patches.view(-1, 1, self.width))
        inner, _ = self.linear_fc1(merged)
        out: Tensor = self.linear_fc2(gelu(inner))[0]
        return out
