"""Grouped matrix product: rows sorted by group, and a matrix for each group.

    rows [n, in], those of group g end at ends[g]    weight [groups, out, in]    rows of g -> rows of g  weight[g]^T

It is torch's, with Transformer Engine and without: core's layer of experts for Transformer Engine reads the groups'
sizes from the device, and launches a product for each. In bf16 torch has one kernel for all, from Hopper on, which
reads `ends` on the device. Elsewhere (CPU, fp32, fp16, older GPUs) the same call multiplies group by group, and waits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from megatron.vlm import platform


class GroupedLinear(torch.nn.Module):
    """A linear layer for each group, weights [groups, out, in]: rows [n, in] -> [n, out]."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.multiply: Callable[[Tensor, torch.nn.Parameter, Tensor], Tensor] = multiply

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows [n, in] of groups that end at `ends` [groups] int32 -> [n, out]."""
        return self.multiply(rows, self.weight, ends)


def multiply(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [n, in] by weight [groups, out, in], group by group; `ends` [groups] int32 -> [n, out]."""
    out: Tensor = _Multiply.apply(rows, weight, ends)
    return out


def weight_gradient(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """Compute the weight's gradient [groups, out, in] from rows [n, in] and the output's [n, out]; zero if no rows."""
    found = grouped_mm(grad.t(), rows, offs=ends)
    if platform.empty_groups_are_left_out():
        found.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
    return found


class _Multiply(torch.autograd.Function):
    """The product with a derivative of its own: torch's cannot delay the weight's gradient, nor fill empty groups."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight, ends)
        return grouped_mm(rows, weight.mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, ends = ctx.saved_tensors
        grad_rows = grouped_mm(grad, weight, offs=ends) if ctx.needs_input_grad[0] else None
        return grad_rows, None if rows is None else weight_gradient(rows, grad, ends), None
