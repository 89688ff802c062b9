"""A model of transformers on balanced packs with DeepSpeed's ZeRO.

    torchrun --nproc-per-node 2 examples/train_deepspeed.py --data DATA --packs PACKS --model FOLDER --steps 20

On a machine without a GPU set DS_ACCELERATOR=cpu; `pip install deepspeed` needs a C++ compiler.
"""

from typing import Any

import torch
import torch.distributed as dist
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
    import deepspeed


def zero_1(micro_batches: int, lr: float) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": HAS_CUDA},  # it keeps the weights in fp32 beside those in bf16
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
    }


def main() -> None:
    """Train for some steps; the loss is the mean over the global batch's counted tokens."""
    arguments = parser(__doc__).parse_args()
    rank, ranks = start_ranks()
    data = ChatDataset(arguments.data)
    model = load_model(data, arguments)
    packs = loader(data, model.config, arguments.packs, ranks, rank)
    micro_batches = packs.batch_sampler.micro_batches
    config = zero_1(micro_batches, arguments.lr)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained(model), config=config)
    for number, step in enumerate(steps(packs, micro_batches, arguments.steps)):
        tokens, total = counted(step), torch.zeros((), device=DEVICE)
        dist.all_reduce(tokens)
        for batch in step:
            labels = batch["labels"]
            loss = loss_of(engine(**{**batch, "labels": None}), labels, tokens)
            engine.backward(loss * ranks, scale_wrt_gas=False)  # of which it takes the mean over ranks
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {number}: loss {float(total):.6f}")
    leave()


if __name__ == "__main__":
    run_tool(main)
