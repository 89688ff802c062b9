"""Two budgets in Energon's packing buffer, by its own PackingDataset."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.integrations.peers import check, drawn, needs, sample

needs("megatron.energon", "megatron-energon")

from megatron.energon import DefaultTaskEncoder, PackingDataset, SavableDataset, WorkerConfig  # noqa: E402

from omnibal_ext.integrations.energon import TwoBudgetPacking  # noqa: E402

COUNT, BUFFER, BUDGETS = 1030, 250, (12, 300)


class Encoder(TwoBudgetPacking, DefaultTaskEncoder):
    """As users write it."""

    vit_budget, llm_budget = BUDGETS


class Listed(SavableDataset[dict[str, Any]]):
    """A list of samples as one of Energon's data sets."""

    def __init__(self, samples: list[dict[str, Any]], workers: WorkerConfig) -> None:
        super().__init__(workers)
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.samples

    def len_worker(self, worker_idx: int | None = None) -> int:
        return len(self.samples)

    def reset_state_own(self) -> None:
        """Nothing to reset."""

    def config(self) -> dict[str, Any]:
        return {}

    def worker_has_samples(self) -> bool:
        return True

    def restore_sample(self, restore_key: Any) -> dict[str, Any]:
        raise NotImplementedError


def packs_of(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What Energon yields when it builds batches with a packing buffer, as `get_train_dataset` does."""
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0)
    built = Encoder().build_batch(Listed(samples, workers), batch_size=None, packing_buffer_size=BUFFER,
                                  worker_config=workers)  # fmt: skip
    assert isinstance(built, PackingDataset)
    workers.worker_activate(0)
    try:
        return list(built)
    finally:
        workers.worker_deactivate()


def test_every_sample_is_in_one_pack_within_both_budgets_without_padding() -> None:
    tiles, tokens = drawn(COUNT)
    packs = packs_of([sample(n, int(tiles[n]), int(tokens[n])) for n in range(COUNT)])
    numbers = [pack["input_ids"].unique().tolist() for pack in packs]
    check(numbers, tiles, tokens, BUDGETS)
    for pack, held in zip(packs, numbers, strict=True):
        assert len(pack["input_ids"]) == tokens[held].sum() == pack["cu_seqlens"][-1]
        assert len(pack.get("pixel_values", torch.zeros(0))) == tiles[held].sum()


def test_a_sample_beyond_a_budget_is_left_out_and_its_buffer_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    tiles, tokens = drawn(60)
    tiles[7], tokens[7] = 13, 200
    packs = packs_of([sample(n, int(tiles[n]), int(tokens[n])) for n in range(60)])
    seen = np.concatenate([pack["input_ids"].unique() for pack in packs])
    assert sorted(seen.tolist()) == [n for n in range(60) if n != 7]
    assert "sample 7 has 13 tiles" in capsys.readouterr().err
