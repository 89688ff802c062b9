"""The loss of a microbatch, and what each of its tokens weighs in the mean over the global batch."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron.vlm.microbatch import Microbatch

REDUCTIONS = {"token": 0.0, "square": 0.5, "sample": 1.0}
"""A token of a sample with n counted tokens weighs n^-power: every token alike, InternVL's square-root averaging
(arXiv 2412.05271, section 3.3), every sample alike."""


def weigh_samples(reduction: str, batch: Microbatch) -> Microbatch:
    """The same microbatch with what each of its samples weighs in the loss, all of its tokens together: the routers of
    its experts are balanced sample by sample, with these weights."""
    if batch.targets is None:
        return batch
    each = batch.targets.clamp(min=1).pow(-REDUCTIONS[reduction])
    return replace(batch, sample_weights=batch.targets * each)


def token_loss(reduction: str, batch: Microbatch, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weighted sum of the losses and sum of the weights, which Megatron sums over the global batch and divides.

    losses [T] fp32, from the last stage. One normaliser for the global batch: the mean depends on no packing, no number
    of microbatches, no layout.
    """
    return weighted_loss(losses, token_weights(batch, REDUCTIONS[reduction]))


def weighted_loss(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What Megatron takes of a loss function: sum to differentiate, normaliser, and both as a record; all [T] fp32."""
    total, normaliser = (losses * weights).sum(), weights.sum()
    return total, normaliser, {"lm loss": torch.stack([total.detach(), normaliser])}


def token_weights(batch: Microbatch, power: float) -> Tensor:
    """[T] fp32: n^-power for the tokens that count, n the number of those in their sample; 0 for the others.

    Everything it needs is on the device already: nothing is copied there, and the host waits for nothing.
    """
    assert batch.loss_mask is not None
    if not power:
        return batch.loss_mask
    assert batch.segment_ids is not None
    if batch.share is not None:  # others hold tokens of its samples
        assert batch.targets is not None
        counts = batch.targets
    else:
        counts = batch.loss_mask.new_zeros(len(batch.lengths)).index_add_(0, batch.segment_ids, batch.loss_mask)
    return batch.loss_mask * counts.clamp(min=1).pow(-power)[batch.segment_ids]
