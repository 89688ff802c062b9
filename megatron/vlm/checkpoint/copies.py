"""What a rank has twice is written once: a tied weight at both ends of the chain, each end in a chunk of its own.

Core's fully parallel save chooses a rank for every shard, and would let it write each of its copies.
"""

from typing import Any

from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, is_main_replica


def leave_out_copies(state: ShardedStateDict) -> None:
    """Of shards of one tensor at one place in `state`, a rank's own, leave one to be written: the main replica if
    that is here."""
    kept: dict[Any, ShardedTensor] = {}
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor) and (_place(shard) not in kept or is_main_replica(shard.replica_id)):
            kept[_place(shard)] = shard

    def once(value: Any) -> Any:
        is_copy = isinstance(value, ShardedTensor) and kept[_place(value)] is not value
        return LocalNonpersistentObject(None) if is_copy else value

    dict_list_map_inplace(once, state)


def _place(shard: ShardedTensor) -> tuple[Any, ...]:
    return shard.key, shard.global_offset, str(shard.flattened_range)
