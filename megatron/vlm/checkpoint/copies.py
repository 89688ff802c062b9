"""Saves a tied weight once if a rank holds it twice, in the first and in the last chunk of its model.

Core's fully parallel save chooses one rank for every shard, but that rank would write each of its copies.
"""

from typing import Any

from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, is_main_replica


def drop_copies(state: ShardedStateDict) -> None:
    """Of shards in this rank's `state` with the same key and offset keep one: the main replica if present."""
    kept: dict[Any, ShardedTensor] = {}
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor) and (_position(shard) not in kept or is_main_replica(shard.replica_id)):
            kept[_position(shard)] = shard

    def without_copies(value: Any) -> Any:
        is_copy = isinstance(value, ShardedTensor) and kept[_position(value)] is not value
        return LocalNonpersistentObject(None) if is_copy else value

    dict_list_map_inplace(without_copies, state)


def _position(shard: ShardedTensor) -> tuple[Any, ...]:
    return shard.key, shard.global_offset, str(shard.flattened_range)
