"""VeOmni's loader of dynamic batches with two budgets, and its table of ways to share out images."""

import numpy as np
import pytest
import torch

from omnibal_ext.errors import UserError
from omnibal_ext.integrations import veomni as ours
from omnibal_ext.integrations.veomni import VIT, TwoBudgetBatching, share_out
from omnibal_ext.rebalance.phases import Phase
from tests.unit.integrations.peers import check, drawn, sample

try:
    from veomni.data import data_loader, dynamic_batching
    from veomni.utils.data_balance import balance_sorting_algo, data_balance
except ImportError:
    data_loader = None
installed = pytest.mark.skipif(
    data_loader is None, reason="veomni is not installed here: docs/integrations.md says how to run these tests"
)


def table(ranks: int, images: int) -> torch.Tensor:
    """Rank, position and patches of each image, as VeOmni gathers them."""
    patches = torch.from_numpy(np.random.default_rng(0).lognormal(6, 1, ranks * images).astype(np.int64)) + 4
    return torch.stack([torch.arange(ranks * images) // images, torch.arange(ranks * images) % images, patches], dim=1)


def slowest(shared: list[torch.Tensor], phase: Phase) -> float:
    return max(float(phase.seconds(rows[:, 2].numpy()).sum()) for rows in shared)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_each_image_goes_to_one_rank_and_no_rank_goes_without(ranks: int) -> None:
    rows = table(ranks, 5)
    shared = share_out(rows, ranks, dim=2)
    assert sorted(row for rank in shared for row in rank.tolist()) == sorted(rows.tolist())
    assert all(len(rank) for rank in shared)
    mean = float(VIT.seconds(rows[:, 2].numpy()).sum()) / ranks
    longest = float(VIT.seconds(rows[:, 2].numpy()).max())
    assert slowest(shared, VIT) <= max(longest, 1.02 * mean) + 1e-9


@installed
@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_slowest_rank_takes_no_longer_than_by_their_way(ranks: int) -> None:
    rows = table(ranks, 5)
    theirs = balance_sorting_algo.post_mbs_balancing_greedy_without_pad(rows, ranks, 2)
    assert slowest(share_out(rows, ranks, 2), VIT) <= slowest(theirs, VIT)


@installed
def test_their_balancer_finds_ours_by_name() -> None:
    ours.install()
    assert data_balance.Qwen3VLEncoderDataBalance._set_sorting_algo("omnibal") is share_out
    rows = table(4, 3)
    balancer = data_balance.Qwen3VLEncoderDataBalance.rank_table_mapping
    mine, shared = balancer(share_out(rows, 4, 2), 1)
    assert sorted(int(position) for part in mine for position in part) == [0, 1, 2]
    assert sum(len(part) for part in shared) == len(rows)


@installed
def test_their_loader_yields_packs_of_two_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_loader, "TextBatchingStrategy", data_loader.TextBatchingStrategy)
    ours.install(vit_budget=12)
    made = data_loader.TextBatchingStrategy(token_micro_bsz=300, buffer_size=100, bsz_warmup_steps=5)
    needed = {name for name in vars(dynamic_batching.BaseBatchingStrategy) if not name.startswith("_")}
    assert needed == {name for name in needed if callable(getattr(made, name))}
    tiles, tokens = drawn(500)
    rows = [[sample(n, int(tiles[n]), int(tokens[n]))] for n in range(500)]
    # As the trainer's loader ends: what the strategy holds is drained.
    loader = dynamic_batching.DynamicBatchSizeDataLoader(
        rows, made, collate_fn=lambda samples: {"samples": samples}, length=1, drop_last=False
    )
    loader._length = 0
    batches = [batch for (batch,) in loader if "padding_flag" not in batch]
    packs = [[int(row["input_ids"][0]) for row in batch["samples"]] for batch in batches]
    check(packs, tiles, tokens, (12, 300))


@installed
def test_batches_that_workers_would_make_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TextBatchingStrategy", "DynamicBatchingSizeDataset"):
        monkeypatch.setattr(data_loader, name, getattr(data_loader, name))
    ours.install(vit_budget=12)
    with pytest.raises(UserError, match="dyn_bsz_runtime worker"):
        data_loader.DynamicBatchingSizeDataset(dataset=[], micro_batch_seq_length=300)


def test_a_stream_is_packed_as_it_comes_and_drained_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    """Between packs no more is read than the last one took out of the buffer: a step waits for no burst."""
    tiles, tokens = drawn(500)
    strategy = TwoBudgetBatching(12, 300, buffer_size=100)
    packs, read = [], [0]
    for number in range(500):
        if strategy.is_ready_for_micro_batch():
            packs.append(strategy.get_micro_batch(number))
            read.append(0)
        strategy.put_item(sample(number, int(tiles[number]), int(tokens[number])))
        read[-1] += 1
    assert read[1:-1] == [len(pack) for pack in packs[:-1]]
    assert max(read[1:]) <= 20
    strategy.put_item(sample(500, 13, 100))
    strategy.put_item(sample(500, 0, 301))
    assert "a sample of 13 tiles and 100 tokens is beyond the budgets" in capsys.readouterr().err
    assert not strategy.empty()
    while not strategy.empty():
        packs.append(strategy.get_micro_batch(0))
    check([[int(row["input_ids"][0]) for row in pack] for pack in packs], tiles, tokens, (12, 300))
    strategy.put_item(sample(0, 0, 1))
    assert strategy.empty()
