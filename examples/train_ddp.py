"""A transformers InternVL on balanced packs with plain PyTorch DDP; then the same on random padded batches.

    torchrun --nproc-per-node 2 examples/train_ddp.py --data DATA --packs PACKS --steps 20

The loss is the mean over the global batch's counted tokens, whatever pack they are in: each rank divides by the sum
over all ranks. The last line is samples a second on packs over those on random batches, in the same run.
"""

import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers_packs import internvl, leave, loader, parser

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.dataset import ChatDataset


def main() -> None:
    """Train on packs, then on random batches of as many samples."""
    arguments = parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = ChatDataset(arguments.data)
    packs = loader(data, arguments.packs, ranks, rank)
    ways = {"packs": (packs, "packed"), "random batches": (random_batches(data, ranks, rank, packs), "sdpa")}
    speeds = {}
    for name, (batches, attention) in ways.items():
        model = internvl(data, arguments.model)
        model.set_attn_implementation({"text_config": attention})
        losses, samples, seconds = train(model, islice(forever(batches), arguments.steps))
        speeds[name] = samples / seconds
        if rank == 0:
            print(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {samples} samples, {speeds[name]:.1f} a second")
    if rank == 0:
        print(f"packs / random batches samples per second: {speeds['packs'] / speeds['random batches']:.2f}x")
    leave()


def train(model: torch.nn.Module, batches: Iterator[dict[str, Any]]) -> tuple[list[float], int, float]:
    """Losses of the steps, samples of all ranks, seconds."""
    # A pack without images leaves the ViT without gradients: DDP is told to expect that.
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, samples, started = [], 0, time.perf_counter()
    for batch in batches:
        counts = torch.tensor([int((batch["labels"] != IGNORED).sum()), samples_of(batch)])
        dist.all_reduce(counts)
        mine = (batch["labels"] != IGNORED).sum()
        mean = wrapped(**batch).loss
        # DDP takes the mean over ranks of what is differentiated here.
        loss = mean * mine / counts[0] * dist.get_world_size() if mine else mean.nan_to_num() * 0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        losses.append(float(total))
        samples += int(counts[1])
    return losses, samples, time.perf_counter() - started


def samples_of(batch: dict[str, Any]) -> int:
    """Samples of a pack, or of a padded batch."""
    return len(batch["cu_seq_lens_q"]) - 1 if "cu_seq_lens_q" in batch else len(batch["input_ids"])


def forever(batches: Any) -> Iterator[dict[str, Any]]:
    """Epoch after epoch."""
    while True:
        yield from batches


def random_batches(data: ChatDataset, ranks: int, rank: int, packs: Any) -> list[dict[str, Any]]:
    """The usual way: as many samples a batch as packs have on average, at random, padded to the longest."""
    index = packs.batch_sampler
    count = max(1, round(len(data) / len(index) / ranks))
    order = random.Random(0).sample(range(len(data)), len(data))
    groups = [order[i : i + count] for i in range(rank * count, len(order) - count + 1, ranks * count)]
    return [pad([data[sample] for sample in group]) for group in groups]


def pad(samples: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """A batch [samples, longest] with its mask."""
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORED)
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    batch: dict[str, Any] = {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long(),
    }
    pixels = torch.cat([sample["pixel_values"] for sample in samples])
    return batch | ({"pixel_values": pixels} if len(pixels) else {})


if __name__ == "__main__":
    main()
