"""Merger of PaddleOCR-VL's patches, square by square, to tokens: the ViT's last norm, then Qwen's merger."""

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu

from megatron.vlm.families.qwen_vl.merger import SquareMerger
from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.norm import build_norm
from megatron.vlm.models.vit.layers import join_rows
from megatron.vlm.models.vit.native import View
from omnibal_ext.architectures.architecture import Architecture


class TwoNorms(SquareMerger):
    """A module from squares of patches to image tokens, in the order of the images; each patch is normalised twice."""

    def __init__(self, vision: TransformerConfig, language: TransformerConfig, architecture: Architecture) -> None:
        super().__init__(vision, language, architecture)
        self.vision_norm = build_norm(self.config, vision.hidden_size, architecture.vision.norm_epsilon)
        self.norm = build_norm(self.config, vision.hidden_size)  # with PyTorch's epsilon, whatever config.json says

    def forward(self, hidden: Tensor, batch: Microbatch, view: View) -> Tensor:
        """Map this rank's rows of ViT output to the image tokens of the pack, [tokens, 1, LLM width], on every rank."""
        patches = self.vision_norm(join_rows(hidden, Images.of(batch).amount, self.shared))
        inner, _ = self.linear_fc1(self.norm(patches).view(-1, 1, self.width))
        out: Tensor = self.linear_fc2(gelu(inner))[0]
        return out
