"""Run on two tensor-parallel ranks: one decodes, the other has no files at all, and both get the same pixels and mels.

arrival.py DATASET PACKS
    prints for every pack the difference between a rank's pixels and mels and those of its samples, decoded here
"""

import sys
from itertools import islice
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron.vlm.data.arrival import Arrivals
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.images import pixels_of
from megatron.vlm.data.loader import Needs, PackDataset, microbatches
from omnibal_ext.packing.index.dispatch import EMPTY_PACK
from omnibal_ext.packing.index.packed_index import PackedIndex
from tests.distributed import harness
from tests.media import heard, mels_of, seen


def main() -> None:
    dataset, packs = sys.argv[1:]
    harness.start(harness.SMALL, 2, 1)
    data, whole = ChatDataset(dataset), ChatDataset(dataset)
    decodes = parallel_state.get_tensor_model_parallel_rank() == 0
    index = PackedIndex.open(Path(packs))
    loaded = PackDataset(data, index, Needs(frozenset({"tiles", "frames"}), tokens=True, labels=True), decodes=decodes)
    assert loaded.reads_media == decodes
    if not decodes:
        data.manifest = {**data.manifest, "image_root": "/no/images/here"}
        assert all(
            seen(pack).values.is_meta and not pack.broken for pack in map(loaded.__getitem__, range(index.num_packs))
        )
    numbers = [*range(index.num_packs), EMPTY_PACK]
    found, side, bins = {}, data.manifest["tile_size"], data.readers["frames"].width if "frames" in data.readers else 0
    for number, pack in zip(numbers, Arrivals(microbatches(loaded, numbers), len(numbers)), strict=True):
        samples = index.samples(number) if number != EMPTY_PACK else []
        expected = torch.cat([torch.empty(0, 3, side, side), *(pixels_of(whole.sample(sample)) for sample in samples)])
        assert seen(pack).values is not None
        assert seen(pack).values.shape == expected.shape
        found[str(number)] = (seen(pack).values - expected).abs().sum().item()
        if "frames" in data.readers:
            assert heard(pack).values is not None
            expected = torch.cat([torch.empty(0, bins), *(mels_of(whole.sample(sample)) for sample in samples)])
            assert heard(pack).values.shape == expected.shape
            found[str(number)] += (heard(pack).values - expected).abs().sum().item()
    assert any(whole.sizes.tiles[list(index.samples(number))].sum() for number in islice(numbers, 3))
    harness.report(found)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
