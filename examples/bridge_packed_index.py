"""A data set for Megatron-Bridge that plays a packed index: tokenised samples stay where they are, packs are numbers.

Use `PackedSamples` as `cfg.dataset` of a recipe, with `micro_batch_size=1`, after

    omnibal pack --sizes sizes.npz --llm-budget 4096 --vit-budget 12 --data-parallel-size 8 --micro-batches 4
"""

from dataclasses import dataclass
from typing import Any

from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider

from omnibal_ext.integrations.megatron_bridge import PackedIndexDataset
from omnibal_ext.integrations.samples import join
from omnibal_ext.packing.index.packed_index import PackedIndex


@dataclass
class PackedSamples(DatasetProvider):
    """`samples` is your tokenised data set, read by number: dicts with input_ids, labels, pixel_values."""

    samples: Any = None
    packs: str = "packs"
    data_parallel_size: int = 8
    micro_batches: int = 4
    dataloader_type: str = "single"

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, None, None]:
        """Return the packs in training order, and nothing to evaluate on."""
        ranks = self.data_parallel_size, self.micro_batches
        return PackedIndexDataset(self.samples, PackedIndex.open(self.packs), *ranks, join), None, None
