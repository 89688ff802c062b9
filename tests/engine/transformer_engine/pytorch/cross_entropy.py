"""Cross entropy over a vocabulary that is cut over ranks; the gradient takes the logits' place."""

from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.kernels import kernel


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        flat, labels = logits.flatten(0, 1), target.flatten()
        rank, ranks, local = (group.rank(), group.size(), flat.shape[1]) if group else (0, 1, flat.shape[1])
        mine = _online_softmax(flat, labels - rank * local)
        everyone = mine.new_empty(ranks * len(mine), 3)
        if ranks > 1:
            torch.distributed.all_gather_into_tensor(everyone, mine, group=group)
        else:
            everyone = mine
        losses = _loss_and_gradient(flat, labels - rank * local, everyone.view(ranks, -1, 3))
        ctx.save_for_backward(flat.detach())
        ctx.shape = logits.shape
        return losses.view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return _times(gradient, grad.flatten()).view(ctx.shape), None, None


@kernel
def _online_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    """[n, 3]: largest, sum of exponentials, and the label's own where it is here (else -inf)."""
    wide = logits.float()
    largest = wide.max(-1).values
    here = (labels >= 0) & (labels < logits.shape[1])
    own = wide.gather(1, labels.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    total = (wide - largest[:, None]).exp().sum(-1)
    return torch.stack([largest, total, torch.where(here, own, torch.full_like(own, -torch.inf))], -1)


@kernel
def _loss_and_gradient(logits: Tensor, labels: Tensor, everyone: Tensor) -> Tensor:
    largest = everyone[..., 0].max(0).values
    total = (everyone[..., 1] * (everyone[..., 0] - largest).exp()).sum(0)
    losses = total.log() + largest - everyone[..., 2].max(0).values
    gradient = (logits.float() - largest[:, None]).exp() / total[:, None]
    here = ((labels >= 0) & (labels < logits.shape[1])).float()
    gradient.scatter_add_(1, labels.clamp(0, logits.shape[1] - 1)[:, None], -here[:, None])
    logits.copy_(gradient)
    return losses


@kernel
def _times(gradient: Tensor, grad: Tensor) -> Tensor:
    return gradient.mul_(grad[:, None])


def parallel_cross_entropy(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> Tensor:
    assert (label_smoothing, reduce_loss) == (0.0, False)
    assert _input.dim() == 3
    assert target.shape == _input.shape[:2]
    losses: Tensor = _CrossEntropy.apply(_input, target, dist_process_group)
    return losses
