"""Padding rows behind a pack's ViT tokens, which make the tensor-parallel size divide them: removed and appended.

Slicing would give the same, but its backward pass writes all rows once for each slice.
"""

from typing import Any

import torch
from torch import Tensor


class SplitHeads(torch.autograd.Function):
    """A split of [rows, 1, heads, 3 d] into query, key, value [count, 1, heads, d], views of the first `count` rows."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, count: int) -> tuple[Tensor, ...]:
        """Return views; nothing is computed or kept."""
        ctx.shape, ctx.count = mixed.shape, count
        return mixed[:count].chunk(3, dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Write each gradient once, where it belongs; padding rows get zero."""
        whole = grads[0].new_empty(ctx.shape)
        whole[ctx.count :].zero_()
        for part, grad in zip(whole[: ctx.count].chunk(3, dim=-1), grads, strict=True):
            part.copy_(grad)
        return whole, None


class FillUp(torch.autograd.Function):
    """Padding of [count, 1, width] to [rows, 1, width] with rows of zeros behind."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: int) -> Tensor:
        """Copy the tokens, and append zeros."""
        ctx.count = len(tokens)
        filled = tokens.new_empty(rows, *tokens.shape[1:])
        filled[: ctx.count].copy_(tokens)
        filled[ctx.count :].zero_()
        return filled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return a view of the tokens' gradient."""
        return grad[: ctx.count], None
