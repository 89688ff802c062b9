"""The links of a ViT, for tiles or at native resolution."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.families.modules import MERGERS, PROJECTORS
from megatron.vlm.models.encoder_links import EncoderLinks
from megatron.vlm.models.vit.layerless import NormedPatchEmbed
from megatron.vlm.models.vit.layers import PatchEmbed
from megatron.vlm.models.vit.native import NativePatchEmbed, Viewer
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.modality import VISION
from omnibal_ext.modalities.vision.architecture import VisionArchitecture


class VisionLinks(EncoderLinks):
    """Patches, a ViT, and one of the projectors that families have."""

    viewed = VISION.kinds

    def layers(self, model: Architecture) -> VisionArchitecture:
        """The ViT."""
        return model.vision

    def embed(self, config: TransformerConfig, model: Architecture) -> torch.nn.Module:
        """Pixels to patches."""
        native = NormedPatchEmbed if model.vision.embedding_norms else NativePatchEmbed
        return (native if model.vision.native else PatchEmbed)(config, model.vision)

    def projector(self, config: TransformerConfig, language: TransformerConfig, model: Architecture) -> torch.nn.Module:
        """Joined patches to image tokens."""
        known = MERGERS if model.vision.native else PROJECTORS
        return known["pooled" if model.pools else model.merger](config, language, model)

    def viewer(self, config: TransformerConfig, model: Architecture) -> Viewer | None:
        """Order, rotation and segments of patches at native resolution."""
        return Viewer(model.vision, config) if model.vision.native and model.vision.layers else None
