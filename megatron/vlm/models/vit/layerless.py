"""Patch embedding and projector of a model without ViT (Gemma 4 without towers).

pixels -> norm -> matrix -> norm -> + learned positions of column and row -> norm | norm without a weight -> matrix
"""

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.configs import outside_layers
from megatron.vlm.models.norm import build_norm, normalised_heads
from megatron.vlm.models.vit.layers import join_rows, share_rows, whole_matrix
from megatron.vlm.models.vit.native import NativePatchEmbed, View
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.vision.architecture import VisionArchitecture


class NormedPatchEmbed(NativePatchEmbed):
    """The layer from patches to rows by one matrix among three LayerNorms: pixels [patches, 3, size, size] -> rows."""

    def __init__(self, config: TransformerConfig, architecture: VisionArchitecture) -> None:
        super().__init__(config, architecture)
        whole, width = outside_layers(config), architecture.hidden_size
        self.pixel_norm = build_norm(whole, 3 * architecture.patch_size**2, kind="LayerNorm")
        self.norm = build_norm(whole, width, kind="LayerNorm")
        self.place_norm = build_norm(whole, width, kind="LayerNorm")

    def forward(self, hidden: None, batch: Microbatch, view: View | None = None) -> Tensor:
        """Map pixels of the pack's patches to rows in the order of the images, this rank's share."""
        images = Images.of(batch)
        assert images.values is not None
        pixels = images.values.to(self.projection.weight.dtype).flatten(1)
        rows = self.norm(self.projection(self.pixel_norm(pixels)))
        rows = self.place_norm(rows + self._of_axes(images.grids))
        return share_rows(rows.unsqueeze(1), self.config)


class NormedMatrix(MegatronModule):
    """The projector of a model without ViT: a norm without weight, then one matrix.

    This rank's rows -> [patches, 1, LLM width], in the order of the images, on every tensor-parallel rank.
    """

    def __init__(self, vision: TransformerConfig, language: TransformerConfig, architecture: Architecture) -> None:
        super().__init__(outside_layers(vision))
        self.shared = vision
        self.linear = whole_matrix(self.config, vision.hidden_size, language.hidden_size, bias=False)

    def forward(self, hidden: Tensor, batch: Microbatch) -> Tensor:
        """Map this rank's rows to image tokens [tokens, 1, LLM width], on every rank."""
        rows = join_rows(hidden, Images.of(batch).amount, self.shared)
        out: Tensor = self.linear(normalised_heads(rows, self.shared.layernorm_epsilon))[0]
        return out
