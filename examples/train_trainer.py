"""A model of transformers on balanced packs with `transformers.Trainer`.

    torchrun --nproc-per-node 2 examples/train_trainer.py --data DATA --packs PACKS --model FOLDER --steps 20 [--lora 8]

`Trainer` counts the tokens of a step over all ranks and hands them to `loss_of`; it only has to be given our batches,
which Accelerate shards beneath it.
"""

import tempfile
from argparse import Namespace

from torch.utils.data import DataLoader
from transformers_packs import HAS_CUDA, leave, load_model, loader, loss_of, parser, start_ranks

from megatron.vlm.data.dataset import ChatDataset
from omnibal_ext.errors import exit_on_user_error, run_tool

with exit_on_user_error():
    import accelerate  # noqa: F401  # `Trainer` wants it
    from transformers import Trainer, TrainingArguments


class PackTrainer(Trainer):
    """Reads packs."""

    packs: DataLoader

    def get_train_dataloader(self) -> DataLoader:
        """The packs of all ranks in turn, of which every process takes its own."""
        batches: DataLoader = self.accelerator.prepare(self.packs)
        return batches


def main() -> None:
    """Train for some steps."""
    arguments = parser(__doc__).parse_args()
    rank, ranks = start_ranks()
    for number, entry in enumerate(train(arguments, ranks)):
        if rank == 0:
            print(f"step {number}: loss {entry['loss']:.6f}")
    leave()


def train(arguments: Namespace, ranks: int) -> list[dict[str, float]]:
    """Some steps; what is logged of each."""
    data = ChatDataset(arguments.data)
    model = load_model(data, arguments)
    packs = loader(data, model.config, arguments.packs, ranks, rank=None)
    with tempfile.TemporaryDirectory() as folder:
        how = TrainingArguments(
            folder,
            use_cpu=not HAS_CUDA,
            bf16=HAS_CUDA,
            max_steps=arguments.steps,
            gradient_accumulation_steps=packs.batch_sampler.micro_batches,
            learning_rate=arguments.lr,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            remove_unused_columns=False,
            ddp_find_unused_parameters=True,
            accelerator_config={"even_batches": False, "dispatch_batches": False},
        )
        trainer = PackTrainer(model, how, train_dataset=data, compute_loss_func=loss_of)
        trainer.packs = packs
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    run_tool(main)
