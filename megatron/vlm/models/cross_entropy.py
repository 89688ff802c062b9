"""Cross entropy over a vocabulary that is cut over tensor-parallel ranks, from logits in the precision that they have.

    kept      the logits; of every row its largest, the sum of its exponentials, its label
    fp32      a few hundred rows at a time; compiled, none
    gradient  in the logits' place

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
"""Whose logits are looked at in fp32 at a time."""


def token_losses(config: TransformerConfig, logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
    """Logits [n, local vocabulary], labels [n] into the whole vocabulary -> [n] fp32. The logits are used up."""
    if config.cross_entropy_loss_fusion:
        fused: Tensor = fused_vocab_parallel_cross_entropy(logits.unsqueeze(1), labels.unsqueeze(1), group)
        return fused.squeeze(1)
    losses: Tensor = _CrossEntropy.apply(logits, labels, group)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
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
        return torch.log(total) - own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, largest, total, local, elsewhere = ctx.saved_tensors
        for rows in _chunks(len(logits)):
            _put_gradient(*(tensor[rows] for tensor in (logits, largest, total, local, elsewhere, grad)))
        return logits, None, None


def _chunks(rows: int) -> Iterator[slice]:
    return (slice(first, first + ROWS) for first in range(0, rows, ROWS))


@jit_fuser
def _sum_of_exponentials(logits: Tensor, largest: Tensor) -> Tensor:
    return (logits.float() - largest.unsqueeze(-1)).exp().sum(-1)


@jit_fuser
def _put_gradient(
    logits: Tensor, largest: Tensor, total: Tensor, local: Tensor, elsewhere: Tensor, grad: Tensor
) -> None:
    """(softmax - 1 at the label) x grad, in the logits' place and precision."""
    softmax = (logits.float() - largest.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    here = torch.where(elsewhere, 0.0, 1.0)
    softmax = softmax.scatter_add(-1, local.unsqueeze(-1), -here.unsqueeze(-1))
    logits.copy_(softmax * grad.unsqueeze(-1))
