"""Rotary positions in one kernel."""

from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.kernels import kernel


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, freqs: Tensor) -> Tensor:
        ctx.save_for_backward(freqs)
        return _rotated(tensor, freqs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _rotated(grad, -ctx.saved_tensors[0]), None


@kernel
def _rotated(tensor: Tensor, freqs: Tensor) -> Tensor:
    first, second = tensor.float().chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (tensor.float() * freqs.cos() + turned * freqs.sin()).to(tensor.dtype)


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", start_positions: Tensor | None = None,
    interleaved: bool = False, fused: bool = False, cu_seqlens: Tensor | None = None, cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:  # fmt: skip
    assert (tensor_format, fused, interleaved, cu_seqlens) == ("sbhd", True, False, None)
    assert freqs.dtype == torch.float32
    assert freqs.shape == (len(t), 1, 1, t.shape[-1])
    rotated: Tensor = _Rotate.apply(t, freqs)
    return rotated
