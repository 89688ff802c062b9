"""A transformers InternVL on balanced packs with DeepSpeed's ZeRO.

    torchrun --nproc-per-node 2 examples/train_deepspeed.py --data DATA --packs PACKS --steps 20

On a machine without a GPU set DS_ACCELERATOR=cpu; `pip install deepspeed` needs a C++ compiler.
"""

import deepspeed
import torch.distributed as dist
from transformers_packs import internvl, leave, loader, parser

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.dataset import ChatDataset

ZERO_1 = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def main() -> None:
    """Train for some steps; the loss is the mean over the global batch's counted tokens."""
    arguments = parser(__doc__).parse_args()
    deepspeed.init_distributed(dist_backend="gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = ChatDataset(arguments.data)
    model = internvl(data, arguments.model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ZERO_1)
    batches, step = loader(data, arguments.packs, ranks, rank), 0
    while step < arguments.steps:
        for batch in batches:
            mine = (batch["labels"] != IGNORED).sum()
            counted = mine.clone()
            dist.all_reduce(counted)
            mean = engine(**batch).loss
            loss = mean * mine / counted * ranks if mine else mean.nan_to_num() * 0
            engine.backward(loss)
            engine.step()
            total = loss.detach() / ranks
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step}: loss {float(total):.4f}")
            step += 1
            if step == arguments.steps:
                break
    leave()


if __name__ == "__main__":
    main()
