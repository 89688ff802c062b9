"""A task encoder of Megatron-Energon, also for Megatron-Bridge, whose packing buffer keeps two budgets.

    python examples/energon_packing.py DATASET

Prints the packs of a prepared data set of captioned images (`energon prepare`, CaptioningSample). `encode_sample` is
what differs between models: here text is bytes, and an image is one tile.
"""

import argparse
from typing import Any

import torch
from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset, stateless

from omnibal_ext.integrations.energon import TwoBudgetPacking


class Encoder(TwoBudgetPacking, DefaultTaskEncoder):
    """Samples become dicts with input_ids and pixel_values; a pack is one of them, with cu_seqlens."""

    vit_budget, llm_budget = 12, 4096

    @stateless
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        """Return a captioned image, encoded."""
        ids = torch.tensor(list(sample.caption.encode()) or [0])
        return {"__key__": sample.__key__, "input_ids": ids, "labels": ids, "pixel_values": sample.image[None]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", metavar="DATASET")
    data = get_train_dataset(
        parser.parse_args().dataset, worker_config=WorkerConfig.default_worker_config(0), batch_size=None,
        task_encoder=Encoder(), packing_buffer_size=1000, shuffle_buffer_size=None, max_samples_per_sequence=None,
        repeat=False,
    )  # fmt: skip
    for pack in get_loader(data):
        print(
            len(pack["cu_seqlens"]) - 1, "samples", len(pack["pixel_values"]), "tiles", len(pack["input_ids"]), "tokens"
        )
