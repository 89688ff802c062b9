"""A model of transformers on balanced packs with Accelerate.

    torchrun --nproc-per-node 2 examples/train_accelerate.py --data DATA --packs PACKS --model FOLDER --steps 20

Accelerate shards batches itself: batch i goes to process i modulo their number. So the sampler gets no rank and yields
the packs of all ranks in turn, and `even_batches` is off, which would fill up by repeating.
"""

from argparse import Namespace
from contextlib import nullcontext

import torch
from transformers_packs import (
    DEVICE,
    HAS_CUDA,
    counted,
    leave,
    load_model,
    loader,
    loss_of,
    parser,
    start_ranks,
    steps,
    trained,
)

from megatron.vlm.data.dataset import ChatDataset
from omnibal_ext.errors import exit_on_user_error, run_tool

with exit_on_user_error():
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import DataLoaderConfiguration


def main() -> None:
    """Train for some steps."""
    arguments = parser(__doc__).parse_args()
    start_ranks()
    accelerator = Accelerator(
        cpu=not HAS_CUDA,
        mixed_precision="bf16" if HAS_CUDA else "no",
        dataloader_config=DataLoaderConfiguration(even_batches=False, dispatch_batches=False),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    train(accelerator, arguments)
    accelerator.free_memory()  # it holds the model
    leave()


def train(accelerator: Accelerator, arguments: Namespace) -> None:
    """Some steps; the loss is the mean over the global batch's counted tokens."""
    data, ranks = ChatDataset(arguments.data), accelerator.num_processes
    model = load_model(data, arguments)
    packs = loader(data, model.config, arguments.packs, ranks, rank=None)
    micro_batches = packs.batch_sampler.micro_batches
    optimizer = torch.optim.AdamW(trained(model), lr=arguments.lr)
    model, optimizer, batches = accelerator.prepare(model, optimizer, packs)
    for number, step in enumerate(steps(batches, micro_batches, arguments.steps)):
        tokens, total = accelerator.reduce(counted(step), reduction="sum"), torch.zeros((), device=DEVICE)
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
