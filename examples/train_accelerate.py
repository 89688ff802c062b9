"""A model of transformers on balanced packs with Accelerate.

    accelerate launch --cpu --num_processes 2 examples/train_accelerate.py --data DATA --packs PACKS --model FOLDER

Accelerate shards batches itself: batch i goes to process i modulo their number. So the sampler gets no rank and yields
the packs of all ranks in turn, and `even_batches` is off, which would fill up by repeating.
"""

from argparse import Namespace
from contextlib import nullcontext

import torch
from transformers_packs import counted, installed, load_model, loader, loss_of, parser, steps, trained

from megatron.vlm.data.dataset import ChatDataset
from omnibal_ext.errors import run_tool

with installed():
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import DataLoaderConfiguration


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
    model = load_model(data, arguments)
    packs = loader(data, model.config, arguments.packs, ranks, rank=None)
    micro_batches = packs.batch_sampler.micro_batches
    optimizer = torch.optim.AdamW(trained(model), lr=arguments.lr)
    model, optimizer, batches = accelerator.prepare(model, optimizer, packs)
    for number, step in enumerate(steps(batches, micro_batches, arguments.steps)):
        tokens, total = accelerator.reduce(counted(step), reduction="sum"), torch.tensor(0.0)
        for turn, batch in enumerate(step, start=1):
            with nullcontext() if turn == len(step) else accelerator.no_sync(model):
                labels = batch["labels"]
                loss = loss_of(model(**{**batch, "labels": None}), labels, tokens)
                accelerator.backward(loss * ranks)  # of which DDP takes the mean over ranks
                total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {number}: loss {float(accelerator.reduce(total, reduction='sum')):.6f}")


if __name__ == "__main__":
    run_tool(main)
