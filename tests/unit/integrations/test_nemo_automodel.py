"""Automodel's balanced packing calls ours, and its packed data set is made of our packs."""

import inspect

import numpy as np
import pytest

from omnibal_ext.integrations import nemo_automodel as ours
from tests.unit.integrations.peers import CORPORA, assert_no_more_packs_and_less_waiting, check, drawn, lengths

try:
    from nemo_automodel.components.datasets.vlm import neat_packing_vlm as theirs

    theirs_of = theirs.greedy_knapsack_vt_balanced
except ImportError:
    theirs = None
installed = pytest.mark.skipif(
    theirs is None, reason="nemo-automodel is not installed here: docs/integrations.md says how to run these tests"
)


def test_packs_keep_the_length_and_a_budget_of_visual_tokens_near_the_mean() -> None:
    tiles, tokens = drawn(900)
    packs = ours.greedy_knapsack_vt_balanced(tokens.tolist(), 300, (8 * tiles).tolist())
    full = 8 * tiles.sum() / (tokens.sum() / 300)
    check(packs, 8 * tiles, tokens, (int(np.ceil(1.05 * full)), 300))
    check(ours.greedy_knapsack_vt_balanced(tokens.tolist(), 300, (8 * tiles).tolist(), visual_budget=96),
          8 * tiles, tokens, (96, 300))  # fmt: skip


def test_a_sample_that_is_too_long_is_left_out_and_one_of_no_tokens_is_not() -> None:
    assert sorted(map(sorted, ours.greedy_knapsack_vt_balanced([5, 11, 0], 10, [0, 0, 0]))) == [[0, 2]]
    assert ours.greedy_knapsack_vt_balanced([], 10, []) == []


@installed
def test_the_signature_is_theirs() -> None:
    wanted = list(inspect.signature(theirs.greedy_knapsack_vt_balanced).parameters)
    assert list(inspect.signature(ours.greedy_knapsack_vt_balanced).parameters)[: len(wanted)] == wanted


@installed
@pytest.mark.parametrize("name", CORPORA)
def test_no_more_packs_than_theirs_and_less_waiting(name: str) -> None:
    """In random order, as the loader reads them; visual tokens are limited to those of their fullest pack."""
    visual, tokens, most = lengths(name)
    theirs = theirs_of(tokens.tolist(), most, visual.tolist())
    fullest = max(int(visual[pack].sum()) for pack in theirs)
    packs = ours.greedy_knapsack_vt_balanced(tokens.tolist(), most, visual.tolist(), visual_budget=fullest)
    check(packs, visual, tokens, (fullest, most))
    shuffled = [theirs[number] for number in np.random.default_rng(0).permutation(len(theirs))]
    assert_no_more_packs_and_less_waiting(packs, shuffled, visual, tokens)


@installed
def test_their_data_set_is_packed_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs, "greedy_knapsack_vt_balanced", theirs.greedy_knapsack_vt_balanced)
    ours.install(visual_budget=1000)
    generator = np.random.default_rng(0)
    text, images = generator.integers(10, 900, 400), generator.integers(0, 3, 400)
    rows = [{"_text_tokens": int(count), "conversation": [{"content": [{"type": "image"}] * int(number)}]}
            for count, number in zip(text, images, strict=True)]  # fmt: skip
    packed = theirs.neat_pack_dataset_vlm(rows, 4096, ds_raw=rows, drop_long_samples=True, packing_ratio=1.0)
    tokens = text + 500 * images - 1  # 500 tokens an image where no processor says how many
    check(packed.bins, 500 * images, tokens, (1000, 4096))
