"""A transformers InternVL on balanced packs with Accelerate.

    accelerate launch --cpu --num_processes 2 examples/train_accelerate.py --data DATA --packs PACKS --steps 20

Accelerate shards batches itself: batch i goes to process i modulo their number. So the sampler gets no rank and yields
the packs of all ranks in turn, and `even_batches` is off, which would fill up by repeating.
"""

from argparse import Namespace

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DataLoaderConfiguration
from transformers_packs import internvl, loader, parser

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.dataset import ChatDataset


def main() -> None:
    """Train for some steps."""
    arguments = parser(__doc__).parse_args()
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(even_batches=False, dispatch_batches=False),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    train(accelerator, arguments)
    accelerator.free_memory()  # the model before the group that it talks over, as in `transformers_packs.leave`
    accelerator.wait_for_everyone()  # `end_training` leaves at once, and a rank may still be spoken to
    accelerator.end_training()


def train(accelerator: Accelerator, arguments: Namespace) -> None:
    """Some steps; the loss is the mean over the global batch's counted tokens."""
    data, ranks = ChatDataset(arguments.data), accelerator.num_processes
    model = internvl(data, arguments.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(data, arguments.packs, ranks, rank=None))
    step = 0
    while step < arguments.steps:
        for batch in batches:
            mine = (batch["labels"] != IGNORED).sum()
            counted = accelerator.reduce(mine.clone(), reduction="sum")
            mean = model(**batch).loss
            loss = mean * mine / counted * ranks if mine else mean.nan_to_num() * 0
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            total = accelerator.reduce(loss.detach() / ranks, reduction="sum")
            accelerator.print(f"step {step}: loss {float(total):.4f}")
            step += 1
            if step == arguments.steps:
                break


if __name__ == "__main__":
    main()
