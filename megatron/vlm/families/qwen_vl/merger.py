"""Merger of Qwen's patches, square by square, to tokens: a norm, and a perceptron of two layers as wide as a square."""

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
from megatron.vlm.models.vit.layers import join_rows
from megatron.vlm.models.vit.native import View
from omnibal_ext.architectures.architecture import Architecture


class SquareMerger(MegatronModule):
    """A module from each square of patches to one token of the language model, in the order of the images.

    The norm is of patches or, for a feature, of whole squares.
    """

    def __init__(
        self, vision: TransformerConfig, language: TransformerConfig, architecture: Architecture, feature: bool = False
    ) -> None:
        super().__init__(outside_layers(vision))
        self.shared, vision = vision, self.config
        self.width = architecture.joined_width
        options = {"config": vision, "init_method": vision.init_method, "bias": True}
        self.normed = self.width if feature else vision.hidden_size
        self.norm = build_norm(vision, self.normed, vision.layernorm_epsilon)
        self.linear_fc1 = ColumnParallelLinear(self.width, self.width, gather_output=False, **options)
        self.linear_fc2 = RowParallelLinear(
            self.width, language.hidden_size, input_is_parallel=True, skip_bias_add=False, **options
        )

    def forward(self, hidden: Tensor, batch: Microbatch, view: View) -> Tensor:
        """Map this rank's rows of ViT output to the image tokens of the pack, [tokens, 1, LLM width], on every rank."""
        rows = join_rows(hidden, Images.of(batch).amount, self.shared)
        normed = self.norm(rows.view(-1, 1, self.normed))
        inner, _ = self.linear_fc1(normed.view(-1, 1, self.width))
        out, _ = self.linear_fc2(gelu(inner))
        return out if view.square_places is None else out[view.square_places]


class PatchMerger(SquareMerger):
    """Projector that merges the ViT's output, and apart from it every feature that enters the language model later."""

    def __init__(self, vision: TransformerConfig, language: TransformerConfig, architecture: Architecture) -> None:
        super().__init__(vision, language, architecture)
        for number in range(len(architecture.vision.feature_layers)):
            # Not in a list of modules: core's checkpoints would take the ranks' parts of its weights for whole ones.
            self.add_module(f"feature_{number}", SquareMerger(vision, language, architecture, feature=True))

    def forward(self, hidden: Tensor, batch: Microbatch, view: View, *features: Tensor) -> Any:
        """Map this rank's rows of ViT output, and of every layer that gives a feature, to image tokens [tokens, 1, LLM
        width] each."""
        out = super().forward(hidden, batch, view)
        merged = [self.get_submodule(f"feature_{n}")(one, batch, view) for n, one in enumerate(features)]
        return (out, *merged) if merged else out
