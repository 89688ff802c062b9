"""Mixtures of experts in the language model; the experts of a layer are multiplied in one grouped product.

    router -> copies of each token, sorted by expert -> first matrices -> activation x the copy's weight -> second
    matrices -> sums by token

A rank has the tensor-parallel shard of all experts of a layer, or with expert parallelism some entire experts, to which
copies are sent (`dispatch`).
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.jit import jit_fuser
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vlm.models.mixture.dispatch import Travel, by_expert
from megatron.vlm.models.mixture.groups import GroupedLinear
from megatron.vlm.models.mixture.router import Balance, Router


class Perceptrons(MegatronModule):
    """The `count` experts of a layer that this expert-parallel rank has, gated perceptrons without bias."""

    def __init__(
        self, count: int, config: TransformerConfig, *, pg_collection: ProcessGroupCollection, name: str | None = None
    ) -> None:
        super().__init__(config)
        self.count, self.groups = count, pg_collection
        self.linear_fc1, self.linear_fc2 = map(GroupedLinear, _drawn(count, config, pg_collection))

    def forward(self, copies: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted outputs [n, width] of copies [n, width] sorted by expert; `ends` [count] int32, the end
        of each expert's copies; `weights` [n]. Partial sums, if experts are sharded over tensor-parallel ranks."""
        inner = self.linear_fc1(copies, ends)
        out: Tensor = self.linear_fc2(_weighed(inner, weights, self.config.activation_func), ends)
        return out

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return each expert by its number among all, as core's experts are saved: [experts, out, in] of all ranks."""
        first, of = self.groups.ep.rank() * self.count, self.groups.ep.size() * self.count
        rank, ranks, axis = self.groups.expt_tp.rank(), self.groups.expt_tp.size(), len(sharded_offsets)

        def sharded(name: str, weight: Tensor, cut: int, halves: int) -> ShardedTensorFactory:
            def build(key: str, tensor: Tensor, replica: Any, _: Any) -> list[ShardedTensor]:
                return [
                    ShardedTensor.from_rank_offsets(
                        key,
                        part,
                        *sharded_offsets,
                        (axis, first + number, of),
                        (axis + cut, rank + half * ranks, halves * ranks),
                        replica_id=replica,
                        prepend_axis_num=axis + 1,
                    )
                    for number, matrix in enumerate(tensor)
                    for half, part in enumerate(matrix.chunk(halves))
                ]

            def merge(parts: list[Tensor]) -> Tensor:
                return torch.cat(parts).view(weight.shape)

            key = f"{prefix}experts.{name}.weight"
            return ShardedTensorFactory(key, weight, build, merge, (0, 0, self.groups.expt_dp.rank()))

        return {
            f"{prefix}linear_fc1.weight": sharded("linear_fc1", self.linear_fc1.weight, cut=1, halves=2),
            f"{prefix}linear_fc2.weight": sharded("linear_fc2", self.linear_fc2.weight, cut=2, halves=1),
        }


@jit_fuser
def _weighed(inner: Tensor, weights: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = inner.chunk(2, dim=-1)
    return (activation(gate) * up * weights[:, None]).to(inner.dtype)


def _drawn(
    count: int, config: TransformerConfig, groups: ProcessGroupCollection
) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    """Draw initial weights [count, out, in] of both linear layers, marked as core marks those of one expert.

    Core's own layers draw them, one expert after the other; those of other ranks are drawn too and dropped, so that an
    expert's initial weights, and those drawn later, are the same at every expert-parallel size.
    """
    alone = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    config, first = copy(config), groups.ep.rank() * count
    config.ffn_hidden_size = config.moe_ffn_hidden_size
    drawn: list[torch.nn.Parameter] = []
    for number in range(groups.ep.size() * count):
        one = MLP(config, alone, True, ffn_hidden_size=config.moe_ffn_hidden_size, tp_group=groups.expt_tp)
        weights = (one.linear_fc1.weight, one.linear_fc2.weight)
        drawn = drawn or [_for_all(weight, count) for weight in weights]
        if first <= number < first + count:
            for whole, weight in zip(drawn, weights, strict=True):
                whole.data[number - first] = weight.data
    return drawn[0], drawn[1]


def _for_all(weight: torch.nn.Parameter, count: int) -> torch.nn.Parameter:
    """Make an empty parameter [count, out, in] for the weights of `count` experts, marked like `weight` of one."""
    whole = torch.nn.Parameter(weight.new_empty(count, *weight.shape))
    vars(whole).update(vars(weight) | {"partition_dim": vars(weight)["partition_dim"] + 1})
    return whole


class Experts(MoELayer):
    """Core's layer of experts: [tokens here, 1, width], in and out. The shared expert is core's, gated token by token.

    Core passes a layer's `padding_mask` to its perceptron, recomputed or not; here it is the pack's `Balance`. Core's
    dispatcher is not used: it counts copies on the host.
    """

    router: Router
    experts: Perceptrons

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Balance | None = None
    ) -> tuple[Tensor, None]:
        """Return the weighted sum of the chosen experts' outputs for each token, and no bias."""
        self.router.balance = padding_mask
        out = self.routed(hidden_states, *self.router(hidden_states))
        return out if self.shared_experts is None else out + self.shared_experts(hidden_states), None

    def routed(self, hidden_states: Tensor, likely: Tensor, chosen: Tensor) -> Tensor:
        """Sum the outputs of experts `chosen` for each row, weighted by `likely`: both [rows here, experts]."""
        rows, cut = hidden_states.flatten(end_dim=-2), self.experts.groups.expt_tp
        if cut.size() > 1:
            rows, likely, chosen = (
                gather_from_sequence_parallel_region(one, group=cut) for one in (rows, likely, chosen)
            )
        out = self._through_experts(rows, likely, chosen)
        if cut.size() > 1:
            out = reduce_scatter_to_sequence_parallel_region(out, group=cut)
        return out.view_as(hidden_states)

    def _through_experts(self, rows: Tensor, likely: Tensor, chosen: Tensor) -> Tensor:
        """Run rows [n, width] through the experts `chosen`, weighted by `likely`, [n, experts] both -> [n, width]."""
        counts = chosen.sum(0)
        travel = Travel(counts, self.ep_group) if self.ep_group.size() > 1 else None
        order, picked = by_expert(chosen, self.router.topk)
        copies, weights = order.copies(rows), likely.flatten().index_select(0, picked)
        if travel is not None:
            copies, weights, counts = travel.there(copies), travel.there(weights), travel.counts
        out = self.experts(copies, counts.cumsum(0, dtype=torch.int32), weights)
        return order.sums(out if travel is None else travel.back(out))


def experts_builder(shared: MLPSubmodules) -> partial[Experts]:
    """Return what builds experts instead of a layer's perceptron; `shared`: projections of the shared expert, used if
    the configuration has one."""
    both = partial(SharedExpertMLP, submodules=shared)
    return partial(Experts, submodules=MoESubmodules(experts=Perceptrons, router=Router, shared_experts=both))
