"""Cross entropy over a tensor-parallel vocabulary, from logits in their own precision.

    kept      the logits; of every row its largest, the sum of its exponentials, its label
    fp32      a few hundred rows at a time; compiled, none
    gradient  overwrites the logits
    capped    logits are cap tanh(x / cap) of the head's output; the gradient is multiplied with 1 - (logit / cap)^2

`--cross-entropy-loss-fusion` takes core's compiled functions instead, which keep the exponentials in fp32. (Transformer
Engine's kernel is refused by Megatron 0.19 itself.)
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.jit import jit_fuser
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

ROWS = 512
"""Rows converted to fp32 at a time."""


def token_losses(
    config: TransformerConfig, logits: Tensor, labels: Tensor, group: ProcessGroup, cap: float | None = None
) -> Tensor:
    """Compute losses fp32 [n] from logits [n, local vocabulary] and labels [n] into the whole vocabulary.

    Without fusion the backward pass overwrites the logits. `cap`: of capped logits (`cap_logits`); the gradient is that
    of the logits before capping.
    """
    if config.cross_entropy_loss_fusion:
        logits = logits if cap is None else _Slope.apply(logits, cap)
        fused: Tensor = fused_vocab_parallel_cross_entropy(logits.unsqueeze(1), labels.unsqueeze(1), group)
        return fused.squeeze(1)
    losses: Tensor = _CrossEntropy.apply(logits, labels, group, cap)
    return losses


@torch.no_grad()
def cap_logits(logits: Tensor, cap: float) -> None:
    """Cap logits [n, words] in place: cap tanh(x / cap). Not recorded by autograd: `token_losses` has the gradient."""
    for rows in _chunks(len(logits)):
        logits[rows].copy_(cap * torch.tanh(logits[rows] / cap))


class _Slope(torch.autograd.Function):
    """The identity of capped logits, with the gradient of capping."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(_slope(logits, cap))
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None


def _slope(capped: Tensor, cap: float) -> Tensor:
    """Return the derivative of capping; words that are never chosen have logits of -inf, and get zero."""
    return (1 - (capped / cap).square()).clamp(min=0)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: ProcessGroup, cap: float | None) -> Tensor:
        largest = logits.amax(dim=-1).float()
        torch.distributed.all_reduce(largest, ReduceOp.MAX, group)
        local = labels - group.rank() * logits.shape[-1]
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        own = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).float() - largest
        own = own.masked_fill(elsewhere, 0.0)
        total = torch.empty_like(largest)
        for rows in _chunks(len(logits)):
            total[rows] = _sum_of_exponentials(logits[rows], largest[rows])
        sums = torch.stack([own, total])
        torch.distributed.all_reduce(sums, group=group)
        own, total = sums
        ctx.save_for_backward(logits, largest, total, local, elsewhere)
        ctx.cap = cap
        return torch.log(total) - own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, largest, total, local, elsewhere = ctx.saved_tensors
        for rows in _chunks(len(logits)):
            _put_gradient(*(tensor[rows] for tensor in (logits, largest, total, local, elsewhere, grad)), ctx.cap)
        return logits, None, None, None


def _chunks(rows: int) -> Iterator[slice]:
    return (slice(first, first + ROWS) for first in range(0, rows, ROWS))


@jit_fuser
def _sum_of_exponentials(logits: Tensor, largest: Tensor) -> Tensor:
    return (logits.float() - largest.unsqueeze(-1)).exp().sum(-1)


@jit_fuser
def _put_gradient(
    logits: Tensor, largest: Tensor, total: Tensor, local: Tensor, elsewhere: Tensor, grad: Tensor, cap: float | None
) -> None:
    """Overwrite the logits with (softmax - 1 at the label) x grad, times the slope if they are capped."""
    softmax = (logits.float() - largest.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    words = torch.arange(logits.shape[-1], device=logits.device)
    # Compared, not scattered: torch's compiler then makes one loop, and writes no fp32 softmax.
    at_label = (words == local.unsqueeze(-1)) & ~elsewhere.unsqueeze(-1)
    gradient = (softmax - at_label.float()) * grad.unsqueeze(-1)
    logits.copy_(gradient if cap is None else gradient * _slope(logits.float(), cap))
