"""Base class of what builds an encoder's layers; each modality has its own, found in `encoders.ENCODERS`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.media import Media
from megatron.vlm.models.configs import vision_config
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.vision.architecture import VisionArchitecture


class EncoderLayers(ABC):
    """The layers of an encoder: an embedding, layers as a ViT's, and a projector."""

    viewed: tuple[str, ...] = ()
    """Kinds of layers that take the viewer's output."""

    @abstractmethod
    def layers(self, model: Architecture) -> VisionArchitecture:
        """Return the sizes of a ViT whose transformer layers are those of this encoder."""

    def config(self, language: TransformerConfig, model: Architecture) -> TransformerConfig:
        """Return core's configuration of the encoder, from the language model's."""
        return vision_config(language, self.layers(model))

    @abstractmethod
    def embed(self, config: TransformerConfig, model: Architecture) -> torch.nn.Module:
        """Build the first layer, from the pack's inputs to this rank's share of rows [rows, 1, width]."""

    @abstractmethod
    def projector(self, config: TransformerConfig, language: TransformerConfig, model: Architecture) -> torch.nn.Module:
        """Build the last layer, from rows to tokens of the language model, [tokens, 1, LLM width], on every rank."""

    @abstractmethod
    def made_up(self, model: Architecture, units: int, lengths: Sequence[int]) -> Media:
        """Make random inputs, `units` (tiles, mel frames) in all, for a pack of samples of these lengths in tokens."""

    def viewer(self, config: TransformerConfig, model: Architecture) -> torch.nn.Module | None:
        """Build what makes a pack's view (order, segments) for layers of the kinds `viewed`; None if none need it."""
        return None
