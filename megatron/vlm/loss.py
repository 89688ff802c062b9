"""The loss of a microbatch, and the weight of each token in the mean over the global batch."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron.vlm.microbatch import Microbatch

REDUCTIONS = {"token": 0.0, "square": 0.5, "sample": 1.0}
"""The weight of a token is n^-power, n the counted tokens of its sample. token: equal tokens; square: InternVL's
square-root averaging (arXiv 2412.05271, section 3.3); sample: equal samples."""


def weigh_samples(reduction: str, batch: Microbatch) -> Microbatch:
    """Add `sample_weights`, each sample's total loss weight, to balance routers; without `targets` change nothing."""
    if batch.targets is None:
        return batch
    each = batch.targets.clamp(min=1).pow(-REDUCTIONS[reduction])
    return replace(batch, sample_weights=batch.targets * each)


def token_loss(reduction: str, batch: Microbatch, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return (weighted sum, sum of weights, record) of losses [T] fp32; `reduction`: "token", "square" or "sample".

    Megatron sums both over the global batch and divides once, so the mean does not depend on packing, microbatches or
    layout.
    """
    return weighted_loss(losses, token_weights(batch, REDUCTIONS[reduction]))


def weighted_loss(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return what Megatron wants of a loss: (sum to differentiate, normaliser, record of both); inputs [T] fp32."""
    total, normaliser = (losses * weights).sum(), weights.sum()
    return total, normaliser, {"lm loss": torch.stack([total.detach(), normaliser])}


def token_weights(batch: Microbatch, power: float) -> Tensor:
    """Return [T] fp32: n^-power for counted tokens, n their number in the sample, else 0. No host synchronisation."""
    assert batch.loss_mask is not None
    if not power:
        return batch.loss_mask
    assert batch.segment_ids is not None
    if batch.shard is not None:  # other ranks hold tokens of its samples
        assert batch.targets is not None
        counts = batch.targets
    else:
        counts = batch.loss_mask.new_zeros(len(batch.lengths)).index_add_(0, batch.segment_ids, batch.loss_mask)
    return batch.loss_mask * counts.clamp(min=1).pow(-power)[batch.segment_ids]
