"""Balanced packs in Lightning, with a tiny model on made-up samples: no GPU is needed.

python examples/lightning_packs.py
"""

from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from omnibal_ext.integrations.torch_loops import PackedBatches, collate

LENGTHS = torch.randint(5, 200, (500,), generator=torch.Generator().manual_seed(0)).tolist()


class Counts(lightning.LightningModule):
    """Learns that the next token is one more; attention is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Embedding(256, 32), torch.nn.Linear(32, 256))

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        """Return the mean loss over a pack's supervised tokens; the first of each sample is none of them."""
        logits = self.layers(batch["input_ids"])[0, :-1]
        return torch.nn.functional.cross_entropy(logits, batch["labels"][0, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    """Train an epoch of packs, of this process' rank."""
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", use_distributed_sampler=False, logger=False,
                                enable_checkpointing=False)  # fmt: skip
    samples = [{"input_ids": torch.arange(length), "labels": torch.arange(length)} for length in LENGTHS]
    sampler = PackedBatches([0] * 500, LENGTHS, 0, 1024, ranks=trainer.world_size, rank=trainer.global_rank)
    model = Counts()
    trainer.fit(model, DataLoader(samples, batch_sampler=sampler, collate_fn=collate))
    print(f"{len(sampler)} packs of {len(samples)} samples")


if __name__ == "__main__":
    main()
