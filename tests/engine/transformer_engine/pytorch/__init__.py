"""The modules of the PyTorch frontend."""

from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.fp8 import fp8_autocast, fp8_model_init
from transformer_engine.pytorch.module.linear import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from transformer_engine.pytorch.module.norms import LayerNorm, RMSNorm

__all__ = [
    "DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm",
    "distributed", "fp8_autocast", "fp8_model_init",
]  # fmt: skip
