"""Stands in for causal-conv1d, as far as transformers asks for it: torch's way, sample by sample."""

import torch
from torch import Tensor


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """Tokens of another number in `seq_idx` [1, T] are not seen."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn as plain

    lengths = [x.shape[2]] if seq_idx is None else seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    return torch.cat([plain.__wrapped__(part, weight, bias, activation) for part in x.split(lengths, 2)], 2)


causal_conv1d_update = None
