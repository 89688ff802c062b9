"""LayerNorm and RMSNorm, each one kernel in either direction."""

from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.kernels import kernel


class _Normalise(torch.autograd.Function):
    """Keeps its input, and mean and 1 / deviation of every row in fp32. `offset` is added to the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, offset: float) -> Tensor:
        out, mean, scale = _forward(x, weight, bias, epsilon, offset)
        ctx.offset = offset
        ctx.save_for_backward(x, weight, scale, *(() if bias is None else (mean,)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, *mean = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = _backward(grad, x, weight, scale, mean[0] if mean else None, ctx.offset)
        return grad_x, grad_weight, grad_bias if mean else None, None, None


@kernel
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.float()
    mean = wide.mean(-1) if bias is not None else torch.zeros_like(wide[..., 0])
    centred = wide - mean[..., None]
    scale = (centred.square().mean(-1) + epsilon).rsqrt()
    out = centred * scale[..., None] * (offset + weight.float())
    return (out if bias is None else out + bias.float()).to(x.dtype), mean, scale


@kernel
def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, mean: Tensor | None, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.float() if mean is None else x.float() - mean[..., None]
    normal, scaled = wide * scale[..., None], grad.float() * (offset + weight.float())
    inner = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
    if mean is not None:
        inner = inner - scaled.mean(-1, keepdim=True)
    rows = tuple(range(grad.dim() - 1))
    grad_weight, grad_bias = (grad.float() * normal).sum(rows), grad.float().sum(rows)
    return (inner * scale[..., None]).to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


class _Norm(torch.nn.Module):
    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, sequence_parallel: bool = False,
        zero_centered_gamma: bool = False, params_dtype: torch.dtype | None = None, device: Any = "cuda", **_: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.offset = eps, float(zero_centered_gamma)
        first = torch.full((normalized_shape,), 1 - self.offset, dtype=params_dtype, device=device)
        self.weight = torch.nn.Parameter(first)
        self.bias: torch.nn.Parameter | None = None
        if isinstance(self, LayerNorm):
            self.bias = torch.nn.Parameter(torch.zeros(normalized_shape, dtype=params_dtype, device=device))
        for weight in self.parameters():
            weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Normalise.apply(x, self.weight, self.bias, self.eps, self.offset)
        return out


class LayerNorm(_Norm):
    """With mean and bias."""


class RMSNorm(_Norm):
    """Without."""


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, offset: float) -> Tensor:
    """As the modules do."""
    out: Tensor = _Normalise.apply(x, weight, bias, epsilon, offset)
    return out
