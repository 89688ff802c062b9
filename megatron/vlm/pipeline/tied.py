"""Tied embeddings: the word embedding and the head are one weight, whichever stages hold them.

    same stage          one parameter
    different stages    two copies that start equal and get the sum of both gradients, so they stay equal

A checkpoint has the weight once, under the word embedding's name, in every layout.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint

from megatron.vlm.models.chain import Chain
from omnibal_ext.plan import Plan

EMBEDDING, HEAD = "word_embed", "head"


def embedding_ranks(plan: Plan) -> Callable[..., list[int]]:
    """Return a function in place of Megatron's `get_embedding_ranks`: of a pipeline's ranks, those that hold the word
    embedding or the head."""
    layers = [plan.chain.index(EMBEDDING), plan.chain.index(HEAD)]
    stages = [
        number
        for number, stage in enumerate(plan.stages)
        if any(stage.layers[0] <= i < stage.layers[1] for i in layers)
    ]
    holders = sorted({plan.placement.ranks_of[stage] for stage in stages})
    return lambda ranks, *_: [ranks[holder] for holder in holders]


def tie(chain: Chain, layers: Any) -> None:
    """Make the head among a stage's `layers`, if there is one, share the word embedding's weight: as one parameter if
    that is here too, else as a copy that starts equal. Nothing happens in untied models."""
    if not chain.architecture.tied:
        return
    if EMBEDDING in layers and HEAD in layers:
        weight = layers[HEAD].linear.weight = layers[EMBEDDING].embedding.weight
        weight.zero_out_wgrad = True  # where the head adds its gradient itself, the embedding's is added to that
        layers.register_load_state_dict_pre_hook(_fill_in_head)
    elif EMBEDDING in layers:
        _mark(layers[EMBEDDING].embedding.weight, counts=True)
    elif HEAD in layers:
        copy = layers[HEAD].linear.weight
        original: Any = chain.build(chain.kinds.index(EMBEDDING))
        copy.data.copy_(original.embedding.weight.data)
        _mark(copy, counts=False)


def _mark(weight: Any, counts: bool) -> None:
    """Mark one of two copies of the tied weight: the distributed optimizer shards both alike, and only that with
    `counts` is in the gradient norm."""
    weight.shared_embedding = True
    weight.shared = not counts


def _fill_in_head(layers: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if f"{prefix}{EMBEDDING}.embedding.weight" in state:
        state[f"{prefix}{HEAD}.linear.weight"] = state[f"{prefix}{EMBEDDING}.embedding.weight"]


def share_in_checkpoint(chain: Chain, layers: Any, state: ShardedStateDict, prefix: str) -> None:
    """Have a checkpoint hold the tied weight once: drop the head's entry of a sharded `state`, or where the word
    embedding is on another stage, make it a copy of the embedding's."""
    if not chain.architecture.tied or HEAD not in layers:
        return
    weight = layers[HEAD].linear.weight
    del state[f"{prefix}{HEAD}.linear.weight"]
    if EMBEDDING not in layers:
        state[f"{prefix}{HEAD}.linear.weight"] = make_tp_sharded_tensor_for_checkpoint(
            tensor=weight,
            key=f"{prefix}{EMBEDDING}.embedding.weight",
            replica_id=(1, 0, parallel_state.get_data_parallel_rank(with_context_parallel=True)),
            allow_shape_mismatch=True,
        )


def reduce_tied_embedding(modules: list[Any], groups: ProcessGroupCollection) -> None:
    """Set the gradient of every copy of the tied weight to the sum of all copies' gradients, after core's reduction.
    Collective over the ranks that hold one."""
    weights = [
        weight for module in modules for weight in module.parameters() if getattr(weight, "shared_embedding", False)
    ]
    gradients = [weight.main_grad for weight in weights if weight.requires_grad]
    if not gradients:
        return
    total = sum(gradients[1:], gradients[0].clone())
    if groups.embd.size() > 1:
        torch.distributed.all_reduce(total, group=groups.embd)
    for gradient in gradients:
        gradient.copy_(total)
