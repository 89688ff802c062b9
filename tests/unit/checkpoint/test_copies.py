"""Of copies of a weight in one save the main replica is written."""

from itertools import permutations
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor

from megatron.vlm.checkpoint.guard import drop_copies


def shard(key: str, replica: int, row: int = 0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full((2, 3), float(replica)), (0, row, 2), replica_id=replica)


@pytest.mark.parametrize("order", permutations(range(3)))
def test_the_main_replica_is_kept_wherever_it_stands(order: tuple[int, ...]) -> None:
    state: dict[str, Any] = {f"copy {replica}": shard("a", replica) for replica in order}
    state["layers"] = [shard("a", 0, row=1), shard("b", 2), {"c": torch.ones(1)}]
    drop_copies(state)
    kept = [name for name, value in state.items() if isinstance(value, ShardedTensor)]
    assert kept == ["copy 0"]
    assert all(isinstance(state[f"copy {replica}"], LocalNonpersistentObject) for replica in (1, 2))
    assert [type(value) for value in state["layers"]] == [ShardedTensor, ShardedTensor, dict]  # each alone at its place
