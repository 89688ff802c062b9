"""Ways to batch: figures are those of their indexes, recomputed pack by pack, and of a sampler's steps by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.comparison import Batching, OnRanks, Order, measure, pack_by_tokens, ways
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import drawn, samples_of

SIZES = drawn(700, 6, (20, 400))
OPTIONS = PackOptions(vit_budget=12, llm_budget=1024, micro_batches=2, pipeline_model_parallel_size=1, seed=3)
COSTS = PackCosts.of_model("tiny", "h100", 12, 1024)
NAMES = [
    "3 random, padded", "5 random, padded", "3 of similar length, padded", "5 of similar length, padded",
    "packs by tokens", "packs by tokens, tiles (ISF)", "balanced packs",
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_figures_are_those_of_the_index(tmp_path: Path, number: int) -> None:
    way = ways(OPTIONS, [3, 5])[number]
    found = measure(Corpus.of(SIZES), way, [2, 4], COSTS)
    assert found.name == way.name == NAMES[number]
    for ranks, here in found.on_ranks.items():
        options = replace(way.options, data_parallel_size=ranks)
        index, summary = build_index(SIZES, tmp_path / f"{ranks}", options, costs=COSTS, packer=way.packer)
        assert (here.steps, here.wait) == (summary.iterations, summary.wait)
        stream = PackStream(index, ranks, 2)
        lasted, samples = 0.0, 0
        for step in range(summary.iterations):
            packs = stream.iteration(step)
            lasted += max(index.seconds(of_rank).sum() for of_rank in packs)
            samples += sum(len(index.samples(pack)) for pack in packs.ravel().tolist())
        assert here.seconds == pytest.approx(ranks * lasted / samples, rel=1e-12)
        assert found.batches == index.num_packs
        assert (found.samples_per_batch, found.padding) == (summary.samples_per_pack, summary.pad_ratio)
    largest = [max(int(SIZES.tiles[index.samples(pack)].sum()) for pack in range(index.num_packs))]
    if number < 6:  # packs of one seed are the same for any ranks; balanced ones exchange samples
        assert largest == [found.most_tiles]
    assert found.most_tiles <= 12 or number < 5
    assert list(found.on_ranks) == [2, 4]


def test_packs_by_tokens_hold_every_sample_once_and_are_as_few_as_best_fit_makes() -> None:
    reasons = (SIZES.tokens > 390).astype(np.int8)
    packs = pack_by_tokens(Corpus.of(SIZES), reasons, OPTIONS, COSTS, 0).packs
    assert sorted(packs.sample_ids.tolist()) == np.flatnonzero(reasons == 0).tolist()
    assert max(SIZES.tokens[own].sum() for own in samples_of(packs)) <= 1024
    assert max(SIZES.tiles[own].sum() for own in samples_of(packs)) > 12
    room: list[int] = []  # best fit decreasing, as TRL packs
    for size in sorted(SIZES.tokens[reasons == 0].tolist(), reverse=True):
        best = min((left for left in room if left >= size), default=1024)
        room = [*(room if best == 1024 else room[: (at := room.index(best))] + room[at + 1 :]), best - size]
    assert len(packs) == pytest.approx(len(room), abs=1)
    # In random order: first fit makes packs of ever more and smaller samples.
    assert abs(np.corrcoef(packs.counts, np.arange(len(packs)))[0, 1]) < 0.3


A_STEP = Sizes.from_arrays([1, 2, 3, 4], [10, 20, 30, 40])
BY_TOKENS = PackCosts({"all": {"tokens": 1.0}})


def order(tmp_path: Path, *steps: Any, samples: int = 4) -> Order:
    (tmp_path / "order.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return Order.read(tmp_path / "order.jsonl", samples)


def test_a_samplers_padded_step(tmp_path: Path) -> None:
    """Two ranks run 2 x 20 and 2 x 40 tokens: the first waits half of the time."""
    found = order(tmp_path, [[0, 1], [2, 3]]).measure("mine", A_STEP, True, BY_TOKENS, True)
    assert found == Batching("mine", 2, 2.0, pytest.approx((10 / 40 + 10 / 80) / 2), 7, 80, {2: OnRanks(1, 0.25, 40.0)})


def test_a_samplers_packed_steps_of_two_microbatches(tmp_path: Path) -> None:
    """Ranks run 10 + 20 and 40 + 0 tokens, then 30 and 10."""
    steps = order(tmp_path, [[[0], [1]], [[3], []]], [[[], [2]], [[0], []]])
    found = steps.measure("mine", A_STEP, False, BY_TOKENS, True)
    lasted = 40 + 30
    assert found == Batching(
        "mine", 5, 1.0, 0.0, 4, 40, {2: OnRanks(2, pytest.approx(1 - 110 / 2 / lasted), 2 * lasted / 5)}
    )


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([[[0, 4]]], r"line 1: \[0\]\[1\] must be a whole number from 0 to 3, got 4; write a line a step"),
        ([[[0], [1]], [[2]]], "line 2: 1 ranks of 1 microbatches, the first line has 2 ranks of 1 microbatches; give"),
        ([[[[0], [1]], [[2]]]], "line 1: 2 ranks of 1 and 2 microbatches"),
        ([[]], "line 1: .*list of 1 to"),
        ([{"rank": 0}], "line 1: .*list"),
        ([[[], []]], "has no samples; write a line a step"),
        ([], "has no samples; write a line a step"),
        ([[[True]]], r"line 1: \[0\]\[0\] must be a whole number from 0 to 3, got True"),
    ],
)
def test_an_order_that_is_none_is_named_with_its_line(tmp_path: Path, steps: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"order\.jsonl: {message}"):
        order(tmp_path, *steps)


def test_a_loss_in_a_sentence() -> None:
    theirs = Batching("theirs", 9, 4.0, 0.365, 48, 32000, {8: OnRanks(9, 0.243, 2.0)})
    ours = Batching("ours", 9, 4.0, 0.0, 23, 8000, {8: OnRanks(9, 0.003, 1.25)})
    assert theirs.against(ours, 8) == (
        "theirs, on 8 ranks: a sample takes 1.60 times the device time of ours, 38% is lost: padding 36.5% "
        "(theirs 0.0%), waiting 24.3% (0.3%), largest batch 48 tiles (23) and 32,000 tokens (8,000)"
    )
    assert "a sample takes 0.62 times the device time of theirs, 0% is lost" in ours.against(theirs, 8)
