"""A model of transformers on balanced packs with TRL's `SFTTrainer`.

    torchrun --nproc-per-node 2 examples/train_trl.py --data DATA --packs PACKS --model FOLDER --steps 20 [--lora 8]

`pip install trl`. `SFTTrainer` packs words alone; here it is given packs that are made, images and all. It insists on a
table of the datasets library and on a tokenizer, and reads neither.
"""

import tempfile
from argparse import Namespace

from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from transformers_packs import HAS_CUDA, leave, load_model, loader, parser, start_ranks

from megatron.vlm.data.dataset import ChatDataset
from omnibal_ext.errors import UserError, exit_on_user_error, run_tool

with exit_on_user_error():
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer


class PackTrainer(SFTTrainer):
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
    if not arguments.model:
        raise UserError("--model is missing: SFTTrainer wants a model's folder, with its tokenizer")
    data = ChatDataset(arguments.data)
    model = load_model(data, arguments)
    if model.config.model_type.startswith("gemma"):
        raise UserError("SFTTrainer adds up masks, of which Gemma's packs have two; use train_trainer.py")
    packs = loader(data, model.config, arguments.packs, ranks, rank=None)
    with tempfile.TemporaryDirectory() as folder:
        how = SFTConfig(
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
            dataset_kwargs={"skip_prepare_dataset": True},
            max_length=None,
            router_aux_loss_coef=0.0,  # TRL's balance of experts is taken over a batch, so it would depend on packs
        )
        trainer = PackTrainer(
            model,
            how,
            data_collator=packs.collate_fn,
            train_dataset=Dataset.from_dict({"sample": range(len(data))}),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
        )
        trainer.packs = packs
        trainer.model_accepts_loss_kwargs = True  # its own loss takes the tokens of a step, if the model's does not
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    run_tool(main)
