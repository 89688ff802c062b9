"""Merger of GLM-V: from squares of patches to tokens.

norm of patches, matrix [square -> token], matrix, LayerNorm, GELU, gated perceptron
"""

from copy import copy

from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu

from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.configs import outside_layers
from megatron.vlm.models.norm import build_norm
from megatron.vlm.models.perceptron import Perceptron
from megatron.vlm.models.vit.layers import join_rows, whole_matrix
from megatron.vlm.models.vit.native import View
from omnibal_ext.architectures.architecture import Architecture


class GatedMerger(MegatronModule):
    """A module from squares of patches to image tokens, in the order of the images (GLM-4.1V)."""

    def __init__(self, vision: TransformerConfig, language: TransformerConfig, architecture: Architecture) -> None:
        super().__init__(outside_layers(vision))
        self.shared, out = vision, language.hidden_size
        self.width = architecture.joined_width
        self.vision_norm = build_norm(self.config, vision.hidden_size, architecture.vision.norm_epsilon)
        self.merge = whole_matrix(self.config, self.width, out, bias=True)
        self.linear = whole_matrix(self.config, out, out, bias=False)
        self.norm = build_norm(self.config, out, kind="LayerNorm")
        inside = copy(self.config)
        inside.hidden_size, inside.ffn_hidden_size = out, architecture.merger_width
        inside.gated_linear_unit, inside.add_bias_linear = True, False
        inside.output_layer_init_method = inside.init_method  # nothing is added up behind it
        self.mlp = Perceptron(
            inside,
            MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
            tp_group=parallel_state.get_tensor_model_parallel_group(),
        )

    def forward(self, hidden: Tensor, batch: Microbatch, view: View) -> Tensor:
        """Map this rank's rows of ViT output to the image tokens of the pack, [tokens, 1, LLM width], on every rank."""
        patches = self.vision_norm(join_rows(hidden, Images.of(batch).amount, self.shared))
        merged, _ = self.merge(patches.view(-1, 1, self.width))
        normed = self.norm(self.linear(merged)[0])
        out: Tensor = self.mlp(gelu(normed))[0]
        return out
