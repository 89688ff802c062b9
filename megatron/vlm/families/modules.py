"""Registry of modules from ViT output to image tokens, by `Architecture.merger`; "pooled" if it `pools`."""

from collections.abc import Callable, Mapping

import torch

from megatron.vlm.families.gemma3.projector import PooledProjector
from megatron.vlm.families.gemma4.pooler import SquarePooler
from megatron.vlm.families.glm_v.merger import GatedMerger
from megatron.vlm.families.mistral3.merger import MatrixMerger
from megatron.vlm.families.paddleocr_vl.merger import TwoNorms
from megatron.vlm.families.qwen_vl.merger import PatchMerger
from megatron.vlm.models.vit.layerless import NormedMatrix
from megatron.vlm.models.vit.projector import Projector, ShuffledProjector

Modules = Mapping[str, Callable[..., torch.nn.Module]]
MERGERS: Modules = {
    "perceptron": PatchMerger,
    "matrix": MatrixMerger,
    "gated": GatedMerger,
    "normed": NormedMatrix,
    "two_norms": TwoNorms,
    "pooled": SquarePooler,
}
"""Projectors of ViTs at native resolution, by `Architecture.merger`, or pooled."""
PROJECTORS: Modules = {"perceptron": Projector, "shuffled": ShuffledProjector, "pooled": PooledProjector}
"""Projectors of ViTs for tiles, by `Architecture.merger`, or pooled."""
