"""Tables of contents with all that torch and Megatron put into them."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata, MCoreSavePlan
from torch.distributed.checkpoint import metadata, planner
from torch.distributed.checkpoint.filesystem import _StorageInfo


def made(mcore: bool = False) -> Any:
    """A table with all that torch, and with `mcore` what Megatron ever, puts into one."""
    properties = metadata.TensorProperties(dtype=torch.bfloat16, memory_format=torch.channels_last, pin_memory=True)
    chunk = metadata.ChunkStorageMetadata(torch.Size([0, 2]), torch.Size([4, 2**40]))
    tensor = metadata.TensorStorageMetadata(properties, torch.Size([8, 4]), [chunk, chunk])
    index = metadata.MetadataIndex("links.a", [0, 2], 1)
    item = planner.WriteItem(index, planner.WriteItemType.SHARD,
                             tensor_data=planner.TensorWriteData(chunk, properties, torch.Size([8, 4])))  # fmt: skip
    plan, table = planner.SavePlan([item, item], planner_data={"a.b": ("a", "b", 0)}), metadata.Metadata({})
    if mcore:
        plan, table = MCoreSavePlan(), MCoreMetadata()
        plan.__dict__ |= {"items": [item], "storage_data": None, "planner_data": None, "mcore_data": None}
        table.mcore_data = {"links.a": {"nd_reformulated_orig_global_shape": (8, 4)}}
    table.state_dict_metadata = {"links.a": tensor, "b": metadata.BytesStorageMetadata()}
    table.planner_data = OrderedDict({"a.b": ("a", "b", 0)})
    table.storage_data = {index: _StorageInfo("__0_0.distcp", 2**40, 7), metadata.MetadataIndex("b"): _StorageInfo(
        "__1_0.distcp", 0, 300, ("zstd",))}  # fmt: skip
    table.storage_meta = metadata.StorageMeta(Path("/a/é"), "x", None, ["m"])
    table.version, table.all_local_plans = "1", [plan]
    return table
