"""A transformers InternVL on balanced packs with `transformers.Trainer`.

    torchrun --nproc-per-node 2 examples/train_trainer.py --data DATA --packs PACKS --steps 20

`Trainer` divides by the global number of counted tokens itself (`average_tokens_across_devices`); it only has to be
handed our batches, which Accelerate shards beneath it.
"""

import os
import tempfile
from argparse import Namespace

from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers_packs import internvl, leave, loader, parser

from megatron.vlm.data.dataset import ChatDataset


class PackTrainer(Trainer):
    """Reads packs."""

    packs: DataLoader

    def get_train_dataloader(self) -> DataLoader:
        """The packs of all ranks in turn, of which every process takes its own."""
        batches: DataLoader = self.accelerator.prepare(self.packs)
        return batches


def main() -> None:
    """Train for some steps."""
    train(parser(__doc__).parse_args())
    leave()


def train(arguments: Namespace) -> None:
    """Some steps, and their losses."""
    data = ChatDataset(arguments.data)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory() as folder:
        how = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=arguments.steps,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
            ddp_find_unused_parameters=True,
            accelerator_config={"even_batches": False, "dispatch_batches": False},
        )
        trainer = PackTrainer(internvl(data, arguments.model), how, train_dataset=data)
        trainer.packs = loader(data, arguments.packs, ranks, rank=None)
        trainer.train()
    if trainer.is_world_process_zero():
        for number, entry in enumerate(line for line in trainer.state.log_history if "loss" in line):
            print(f"step {number}: loss {entry['loss']:.4f}")


if __name__ == "__main__":
    main()
