"""The replicated tower: every rank of a replica has copies of its layers, and each layer has one owner.

    owner                                   all ranks of the replica
    weight in its Stage, trained, saved --> copy                     broadcast after every step of the optimizer
    its gradient                        <-- sum of the copies'       reduced after the last backward

Owners keep layers unsharded under their names in the chain: optimizer, clipping and checkpoints treat them like all
other weights. Copies are outside of the modules that Megatron trains. Weights and sums are exchanged as one flat tensor
for each owner, in the same order on all ranks, whether they have encoded images or not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron.vlm.data.arrival import with_values
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.alone import alone
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from omnibal_ext.plan import Plan
from omnibal_ext.plan_tower import Tower as TowerPlan


@dataclass
class Piece:
    """This rank's copies of the weights that one rank owns, either trained or frozen ones, as one flat tensor."""

    owner: int
    """Rank of the owner in the job."""
    weights: Tensor
    copies: list[Tensor]
    """Views of `weights`, one for each weight."""
    owned: list[torch.nn.Parameter]
    """Parameters of the owner; empty on other ranks."""
    sums: Tensor | None
    """fp32 sums of the copies' gradients; None if they are not trained."""

    @property
    def totals(self) -> list[Tensor]:
        """Views of `sums`, one for each weight."""
        assert self.sums is not None
        return _views(self.sums, self.copies)


class Tower:
    """One rank's copy of the replicated tower, and its exchanges with the ranks that own (train, save) the weights."""

    def __init__(self, chain: Chain, plan: TowerPlan, stage: Stage) -> None:
        """Make the copies; `stage` is this rank's first chunk, with the layers that it owns. Collective over the
        replica."""
        self.chain, self.plan = chain.whole(), plan
        with alone():
            self.copies = Stage(self.chain, 0, plan.layers, plan.recompute).cuda()
        self.group = parallel_state.get_model_parallel_group()
        self.trained = self.copies.has_backward
        self.is_stale = True
        """Whether the optimizer has stepped since the last broadcast."""
        self._has_frozen = False
        self.pieces = [piece for trained in (True, False) for piece in self._pieces(stage, trained)]

    def _pieces(self, stage: Stage, trained: bool) -> Iterator[Piece]:
        for rank, owner in enumerate(dist.get_process_group_ranks(self.group)):
            layers = [name for name, whose in zip(self.copies.links, self.plan.owners, strict=True) if whose == rank]
            copies, owned = (
                [
                    weight
                    for name in layers
                    if name in module.links
                    for weight in module.links[name].parameters()
                    if weight.requires_grad == trained
                ]
                for module in (self.copies, stage)
            )
            if copies:
                yield _flatten(owner, copies, owned, trained)

    def refresh(self) -> None:
        """Broadcast the owners' weights to the copies if the optimizer has stepped since; frozen ones once. Collective
        over the replica."""
        for piece in self.pieces if self.is_stale else ():
            if piece.sums is None and self._has_frozen:
                continue
            if piece.owned:
                torch._foreach_copy_(piece.copies, [weight.detach() for weight in piece.owned])
            if self.group.size() > 1:
                dist.broadcast(piece.weights, piece.owner, self.group)
        self.is_stale, self._has_frozen = False, True

    def encode(self, share: Microbatch, training: bool, keeps: bool) -> Tensor:
        """Encode a rank's share of a pack; return [rows, 1, LLM width]: image tokens, their features, sound tokens.

        `keeps`: keep what a backward needs.
        """
        self.copies.train(training)
        with alone(), torch.set_grad_enabled(keeps):
            tokens: Tensor = self.copies(with_values(share))
        return tokens

    def backward(self, tokens: Tensor, gradient: Tensor) -> None:
        """Run the backward of `encode`; it adds the gradients of the copies' weights to the sums."""
        with alone():
            torch.autograd.backward((tokens,), (gradient,))

    def reduce(self) -> None:
        """Add the sums of all ranks to the gradients of the owners' weights, once an iteration. Collective.

        They are added to Megatron's `main_grad` in fp32; its hooks are called as for any gradient.
        """
        for piece in self.pieces:
            if piece.sums is None:
                continue
            if self.group.size() > 1:
                dist.reduce(piece.sums, piece.owner, group=self.group)
            for weight, total in zip(piece.owned, piece.totals if piece.owned else (), strict=True):
                _hand_over(weight, total)
            piece.sums.zero_()


def owned_layers(plan: Plan, vp_stage: int | None) -> tuple[int, ...]:
    """Return the layers of a replicated tower whose weights this rank trains and saves (owns), as indices in the chain:
    with its first chunk all of them, with others none."""
    if plan.tower is None or vp_stage:
        return ()
    here, tensor = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    rank = here * parallel_state.get_tensor_model_parallel_world_size() + tensor
    return tuple(layer for layer, owner in enumerate(plan.tower.owners) if owner == rank)


def _flatten(
    owner: int, weights: Sequence[torch.nn.Parameter], owned: list[torch.nn.Parameter], trained: bool
) -> Piece:
    """Make weights views of one flat tensor and, if trained, have autograd add their gradients to another, in fp32."""
    flat = torch.cat([weight.detach().flatten() for weight in weights])
    sums = torch.zeros_like(flat, dtype=torch.float32) if trained else None
    piece = Piece(owner, flat, _views(flat, weights), owned, sums)
    for weight, view in zip(weights, piece.copies, strict=True):
        weight.data = view
    for weight, total in zip(weights, piece.totals if trained else (), strict=False):
        weight.register_post_accumulate_grad_hook(partial(_add, total))
    return piece


def _views(flat: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Split a flat tensor into views, one in the shape of each weight."""
    parts = flat.split([weight.numel() for weight in weights])
    return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]


def _add(total: Tensor, weight: Any) -> None:
    total.add_(weight.grad)
    weight.grad = None


def _hand_over(weight: Any, total: Tensor) -> None:
    weight.main_grad.add_(total)
    weight.grad_added_to_main_grad = True  # what autograd is given is read by nobody
    torch.autograd.backward((weight,), (torch.empty_like(weight),))
    weight.grad_added_to_main_grad = False
