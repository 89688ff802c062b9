"""What `--check` says of two models' logits, and on which samples."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.hf.check import largest
from megatron.vlm.hf.check_samples import samples_of
from megatron.vlm.preprocessing.demo import make_demo_data
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.preprocess import preprocess
from megatron.vlm.preprocessing.samples import Recipe


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_logit_that_is_no_number_is_the_difference(place: int) -> None:
    """Wherever it is: Python's `max` keeps what comes first."""
    differences = [torch.zeros(2, 3), torch.ones(4, 3), torch.full((1, 3), 0.5)]
    assert largest(differences) == 1
    differences[place][-1, -1] = math.nan
    assert math.isnan(largest(differences))


def test_a_datasets_shortest_sample_with_images_and_without(tmp_path: Path) -> None:
    make_demo_data(tmp_path, samples=40, heldout_samples=1, seed=3)
    recipe = Recipe(tmp_path, tmp_path / "tokenizer.model", "internlm2-chat", Tiling(32, max_tiles=32), 4)
    preprocess(open_job([tmp_path / "train.jsonl"], recipe, tmp_path / "data"))
    data = ChatDataset(tmp_path / "data")
    shown = data.sizes.tiles > 0
    assert 0 < shown.sum() < len(data)
    for sample, group in zip(samples_of(data.folder), (shown, ~shown), strict=True):
        assert len(sample.ids) == data.sizes.tokens[group].min()
        (number,) = [one for one in np.flatnonzero(group) if np.array_equal(data.text(one)[0], sample.ids)][:1]
        assert torch.equal(sample.pixels, data.pixels(number))
        assert sum(features for features, _ in sample.images) == 4 * data.sizes.tiles[number]
