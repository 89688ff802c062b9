"""A batch sampler of packs in Accelerate, Trainer, TRL and Lightning: each process reads its own packs, once."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from omnibal_ext.errors import UserError
from omnibal_ext.integrations import torch_loops
from omnibal_ext.integrations.torch_loops import PackedBatches, PacksOfTrainer, collate
from tests.unit.integrations.peers import check, drawn, sample

COUNT, BUDGETS = 400, (12, 300)
TILES, TOKENS = drawn(COUNT)


class Samples(Dataset):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> dict[str, Any]:
        return sample(number, int(TILES[number]), int(TOKENS[number]))


def sampler(ranks: int = 4, rank: int | None = None, seed: int = 0) -> PackedBatches:
    return PackedBatches(TILES, TOKENS, *BUDGETS, ranks=ranks, rank=rank, seed=seed)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_read_equally_many_packs_and_together_every_sample_once(ranks: int) -> None:
    of_ranks = [list(sampler(ranks, rank)) for rank in range(ranks)]
    assert {len(packs) for packs in of_ranks} == {len(sampler(ranks, 0))}
    check([pack for packs in of_ranks for pack in packs], TILES, TOKENS, BUDGETS)
    in_turn = [pack for step in zip(*of_ranks, strict=True) for pack in step]
    assert (list(sampler(ranks)), len(sampler(ranks))) == (in_turn, len(in_turn))


def test_epochs_are_packed_anew_and_repeat_after_a_restart() -> None:
    """Whether the trainer says which epoch it is, or only reads once more."""
    counted, told = sampler(), sampler()
    epochs = [list(counted) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    for epoch in (0, 2, 1, 1):
        told.set_epoch(epoch)
        assert list(told) == epochs[epoch]
    assert list(told) == epochs[2]


def test_ranks_and_samples_that_do_not_suffice_are_refused() -> None:
    with pytest.raises(UserError, match="rank 4 is not one of 4"):
        sampler(4, 4)
    with pytest.raises(UserError, match="give more samples"):
        PackedBatches([0], [5], 4, 10, ranks=2)
    for ranks in (0, -1, None):
        with pytest.raises(UserError, match="ranks must be a whole number of at least 1"):
            sampler(ranks)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no pack is left"):
        PackedBatches([0], [50], 4, 10, ranks=1, beyond="drop")
    with pytest.raises(UserError, match="two lists of one length"):
        PackedBatches((n for n in [1]), (n for n in [5]), 4, 10, ranks=1)
    with pytest.raises(UserError, match="leave rank out"):
        _ = sampler(4, 1).batch_size
    assert sampler().batch_size is None


def test_packs_that_nobody_shares_out_are_refused_where_several_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_loops, "_processes", lambda: 4)
    with pytest.raises(UserError, match="each would train on all: give rank"):
        iter(sampler(4))
    shared = sampler(4)
    assert shared.batch_size is None, "what shards batches asks first"
    assert list(shared)
    assert list(sampler(4, 1))


def test_a_batch_is_what_transformers_reads_of_a_pack() -> None:
    batch = collate([sample(3, 1, 2), sample(4, 0, 3)])
    assert batch["input_ids"].tolist() == [[3, 3, 4, 4, 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]
    # Boundaries would cut apart the patches of images too, in models that hand them on to their ViT.
    assert batch.keys() == {"input_ids", "labels", "position_ids", "pixel_values", "use_cache"}
    assert batch["pixel_values"].shape == (1, 3, 2, 2)
    assert batch["use_cache"] is False


def numbers(batch: dict[str, Any]) -> list[int]:
    return batch["input_ids"].unique().tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_accelerate_gives_each_process_its_ranks_packs_and_others_in_the_next_epoch(rank: int) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    packs = DataLoader(Samples(), batch_sampler=sampler(2), collate_fn=collate)
    mine = data_loader.prepare_data_loader(packs, num_processes=2, process_index=rank, even_batches=False)
    expected = sampler(2, rank)
    for _ in range(3):
        assert [numbers(batch) for batch in mine] == [sorted(pack) for pack in expected]


class Mean(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.read: list[list[int]] = []

    def forward(self, input_ids: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        self.read.append(input_ids.unique().tolist())
        return {"loss": (input_ids.float() * self.weight).mean()}


def test_transformers_trainer_trains_an_epoch_of_packs(tmp_path: Any) -> None:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class PackTrainer(PacksOfTrainer, transformers.Trainer):
        pass

    packs = sampler(1)
    how = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, num_train_epochs=1, save_strategy="no", report_to=[], remove_unused_columns=False,
        disable_tqdm=True, accelerator_config={"even_batches": False, "dispatch_batches": False},
    )  # fmt: skip
    how.max_epochs = None  # ms-swift, where other tests import it, has Trainer ask for it
    model = Mean()
    trainer = PackTrainer(model, how, train_dataset=Samples())
    trainer.packs = DataLoader(Samples(), batch_sampler=packs, collate_fn=collate)
    trainer.train()
    assert model.read == [sorted(pack) for pack in sampler(1)]


def test_trls_trainer_takes_the_same_mixin() -> None:
    trl: Any = pytest.importorskip(
        "trl", reason="trl is not installed here: docs/integrations.md says how to run this test"
    )

    class PackTrainer(PacksOfTrainer, trl.SFTTrainer):
        pass

    assert PackTrainer.get_train_dataloader is PacksOfTrainer.get_train_dataloader
    assert "get_train_dataloader" in vars(PacksOfTrainer)
    assert hasattr(trl.SFTTrainer, "get_train_dataloader")


def test_lightning_reads_the_packs_of_its_rank(tmp_path: Any) -> None:
    reason = "lightning is not installed here: docs/integrations.md says how to run this test"
    lightning: Any = pytest.importorskip("lightning", reason=reason)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Mean()

        def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Samples(), batch_sampler=sampler(3, 1), collate_fn=collate))
    assert module.model.read == [sorted(pack) for pack in sampler(3, 1)]
