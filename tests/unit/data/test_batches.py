"""A pack's words: positions begin with each sample, and no sample predicts another's token."""

import pytest
import torch

from megatron.vlm.data.batches import IGNORED, boundaries, join_words
from omnibal_ext.errors import UserError

SAMPLES = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in ([5, 6], [7, 8, 9])]


def test_no_sample_is_predicted_by_the_one_before_it() -> None:
    batch = join_words(SAMPLES)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert batch["labels"].tolist() == [[IGNORED, 6, IGNORED, 8, 9]]


def test_samples_are_told_apart() -> None:
    batch, edges = join_words(SAMPLES), boundaries(SAMPLES)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    assert batch["use_cache"] is False
    assert edges["cu_seq_lens_q"].tolist() == edges["cu_seq_lens_k"].tolist() == [0, 2, 5]
    assert edges["cu_seq_lens_q"].dtype == torch.int32
    assert edges["max_length_q"] == edges["max_length_k"] == 3


def test_a_pack_without_samples_is_refused_in_a_line() -> None:
    with pytest.raises(UserError, match="ask for fewer ranks or micro-batches"):
        join_words([])
