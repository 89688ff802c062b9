"""A pack's batch: no sample predicts another's token, even where a first token counts."""

import torch

from megatron.vlm.data.batches import IGNORED, JoinPack


def test_no_sample_is_predicted_by_the_one_before_it() -> None:
    pixels = torch.zeros(0, 3, 4, 4)
    samples = [
        {"input_ids": ids, "labels": ids.clone(), "pixel_values": pixels} for ids in torch.tensor([[5, 6], [7, 8]])
    ]
    batch = JoinPack("sample")(samples)
    assert batch["labels"].tolist() == [[IGNORED, 6, IGNORED, 8]]
    assert batch["weights"].tolist() == [[0.0, 1.0, 0.0, 1.0]]
    assert "pixel_values" not in batch
