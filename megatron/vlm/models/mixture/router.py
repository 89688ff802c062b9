"""Routers of mixtures of experts: core's, balanced sample by sample.

    probabilities of token x    p[x, :] = softmax(x W), over all experts, fp32
    a sample s of n tokens      A[s] = E / k  sum_i  (tokens of s at expert i) / n  *  (sum over x in s of p[x, i]) / n
    loss of the global batch    sum_s w[s] (loss[s] + coefficient * sum over layers of A[s])  /  sum_s w[s]

A is core's `seq_aux_loss` (Switch Transformer, arXiv 2101.03961; one for each sequence, arXiv 2412.19437) of one
sample, 1 where all experts are as likely; w is what the sample weighs in the loss. Over a microbatch, as core takes it,
it would depend on which samples share a pack; so it depends on no pack, no layout and no number of ranks.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.microbatch import Microbatch, PackShard
from megatron.vlm.models.norm import normalised_heads

BALANCING = "seq_aux_loss"
"""Core's name of a balance loss per sequence, under which its coefficient is found."""


@dataclass(frozen=True)
class Balance:
    """The sample of each token of a pack, and the weight of each sample in the balance loss."""

    samples: Tensor
    """Number of each token's sample [T]; padding has the number behind the last."""
    lengths: Tensor
    """Tokens of each sample, fp32 [samples + 1]."""
    weights: Tensor
    """Weight of each sample, fp32 [samples + 1]; the last, of padding, is 0."""
    share: PackShard | None = None
    """This rank's shard of a wide pack; None: the pack is not split."""

    @classmethod
    def of(cls, batch: Microbatch) -> "Balance | None":
        """Return tokens' samples and samples' weights in the balance loss; None where a pack has no such weights."""
        if batch.sample_weights is None:
            return None
        pack = batch.full_pack
        ids, count = batch.host_segment_ids, len(pack.lengths)
        true = torch.tensor(pack.sample_lengths or pack.lengths)
        true = torch.cat([true, true.new_zeros(count - len(true))])
        ids = torch.where(batch.host_positions < true[ids], ids, count)
        lengths = torch.cat([true, true.new_ones(1)]).clamp(min=1).float()
        weights = torch.cat([batch.sample_weights, batch.sample_weights.new_zeros(1)])
        return cls(platform.to_device(ids), platform.to_device(lengths), weights, batch.shard)


class Router(TopKRouter):
    """Core's router, with a balance loss per sample; a selection bias stays as it was loaded."""

    balance: Balance | None = None
    """Samples of the next pack; None: no balance loss."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.frozen_expert_bias = True

    def gating(self, input: Tensor) -> Tensor:
        """Map rows [..., width] to logits [..., experts], in the precision that routers compute in."""
        if input.dtype == torch.float32 or self.config.moe_router_dtype != "fp32":
            wide: Tensor = super().gating(input)
            return wide
        logits: Tensor = _Logits.apply(input.flatten(end_dim=-2), self.weight)
        return logits.view(*input.shape[:-1], -1)

    def _apply_seq_aux_loss(self, probs: Tensor, scores: Tensor, routing_map: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return `probs`, whose backward pass also starts the balance loss's: core's hook for it. `scores` and
        `routing_map`: [tokens here, experts]."""
        if self.balance is None:
            return probs
        shared = self.config.sequence_parallel and self.tp_group.size() > 1
        samples, size = self.balance.samples, len(self.balance.lengths)
        if shared:
            samples = samples.chunk(self.tp_group.size())[self.tp_group.rank()]
        chosen, likely = (
            scores.new_zeros(size, self.num_experts).index_add(0, samples, part)
            for part in (routing_map.to(scores.dtype), scores)
        )
        if shared:
            torch.distributed.all_reduce(chosen, group=self.tp_group)
        if (share := self.balance.share) is not None:
            torch.distributed.all_reduce(chosen, group=share.team)
        lengths, weights = self.balance.lengths, self.balance.weights
        balances = (chosen * likely).sum(1) * (self.num_experts / self.topk) / lengths.square()
        total = (balances * weights).sum()
        get_moe_metrics_tracker().record(
            "seq_load_balancing_loss",
            total
            * (share.width if share else 1)
            / weights.sum().clamp(min=1e-8),  # of which the mean over ranks is taken
            self.layer_number,
            self.config.num_layers,
            reduce_group=self.tp_group if shared else None,
        )
        scaled: Tensor = MoEAuxLossAutoScaler.apply(probs, total * self.get_aux_loss_coeff(BALANCING))
        return scaled


class ScaledRouter(Router):
    """A router that normalises and scales its input, and scales the weight of each expert (Gemma 4)."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.scale = torch.nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))
        self.expert_scale = torch.nn.Parameter(torch.ones(self.num_experts, dtype=config.params_dtype))
        for weight in (self.scale, self.expert_scale):
            setattr(weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (Megatron marks weights so)

    def gating(self, input: Tensor) -> Tensor:
        """Map rows [..., width], normalised and scaled here, to logits [..., experts]."""
        rows = normalised_heads(input, self.config.layernorm_epsilon)
        return super().gating(rows * self.scale * self.config.hidden_size**-0.5)

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the experts' weights, and which are chosen: [rows, experts] both."""
        likely, chosen = super().forward(*arguments, **options)
        return likely * self.expert_scale.to(likely.dtype), chosen


class _Logits(torch.autograd.Function):
    """Logits in fp32 of rows in half precision; core copies the rows to fp32, forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return platform.wide_product(rows, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        narrow = grad.to(rows.dtype)
        return narrow @ weight, narrow.t() @ rows
