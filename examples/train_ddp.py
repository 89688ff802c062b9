"""A model of transformers on balanced packs with plain PyTorch DDP; beside it the same on random padded batches.

    torchrun --nproc-per-node 2 examples/train_ddp.py --data DATA --packs PACKS --model FOLDER --steps 20

The loss is the mean over the global batch's counted tokens, whatever pack they are in: each rank divides by the sum
over all ranks. The last line is samples a second on packs over those on random batches, and the range of single steps.
The two take turns, after a step each to warm up, and read and decode within the time; so both models are in memory.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers_packs import (
    DEVICE,
    counted,
    in_bf16,
    leave,
    load_model,
    loader,
    loss_of,
    parser,
    start_ranks,
    steps,
    trained,
)

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.hf.packs import JoinPack
from omnibal_ext.errors import run_tool

Step = tuple[float, int, float]
"""Its loss, its samples on all ranks, its seconds."""


def main() -> None:
    """Train on packs, and in turns on random batches of as many samples."""
    arguments = parser(__doc__).parse_args()
    rank, ranks = start_ranks()
    data = ChatDataset(arguments.data)
    models = [load_model(data, arguments) for _ in range(2)]
    packs = loader(data, models[0].config, arguments.packs, ranks, rank)
    batches = {"packs": packs, "random batches": random_loader(data, models[1].config, ranks, rank, len(packs))}
    micro_batches, count = packs.batch_sampler.micro_batches, arguments.steps + 1
    runs = [
        train(model, steps(read, micro_batches, count), arguments.lr)
        for model, read in zip(models, batches.values(), strict=True)
    ]
    turns = list(zip(*runs, strict=True))  # a step of each
    if rank == 0:
        report(tuple(batches), turns)
    leave()


def report(names: Sequence[str], turns: Sequence[tuple[Step, ...]]) -> None:
    """What each way did; the first over the second, in all and in single turns."""
    rates = []
    for name, run in zip(names, zip(*turns, strict=True), strict=True):
        _, samples, seconds = map(sum, zip(*run[1:], strict=True))  # the first step warmed up
        rates.append(samples / seconds)
        print(f"{name}: loss {run[0][0]:.6f} to {run[-1][0]:.6f}, {samples} samples, {rates[-1]:.1f} a second")
    each = [(ours[1] / ours[2]) / (theirs[1] / theirs[2]) for ours, theirs in turns[1:]]
    whole = f"{rates[0] / rates[1]:.2f}x (single steps {min(each):.2f}x to {max(each):.2f}x)"
    print(f"{' / '.join(names)} samples per second: {whole}")


def train(model: torch.nn.Module, batches: Iterator[list[dict[str, Any]]], lr: float) -> Iterator[Step]:
    """A step each time that one is asked for; it is read and decoded then."""
    # A pack without images leaves the ViT without gradients: DDP is told to expect that.
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(trained(model), lr=lr)
    dist.barrier()
    started = time.perf_counter()
    for step in batches:
        optimizer.zero_grad()
        loss = float(backward(wrapped, step))
        optimizer.step()
        samples = torch.tensor(sum(map(samples_of, step)), device=DEVICE)
        dist.all_reduce(samples)
        yield loss, int(samples), time.perf_counter() - started
        started = time.perf_counter()


def backward(wrapped: DistributedDataParallel, step: list[dict[str, Any]]) -> Tensor:
    """The loss of a step, the mean over its counted tokens on all ranks; its gradients are added."""
    tokens, total = counted(step), torch.zeros((), device=DEVICE)
    dist.all_reduce(tokens)
    for number, batch in enumerate(step, start=1):
        with nullcontext() if number == len(step) else wrapped.no_sync():
            labels = batch["labels"]
            with in_bf16():
                outputs = wrapped(**{**batch, "labels": None})
            loss = loss_of(outputs, labels, tokens)
            (loss * dist.get_world_size()).backward()  # of which DDP takes the mean over ranks
            total += loss.detach()
    dist.all_reduce(total)
    return total


def samples_of(batch: dict[str, Any]) -> int:
    """Each begins at position 0."""
    positions = batch["position_ids"]
    return int((positions if positions.dim() == 2 else positions[0]).eq(0).sum())


def random_loader(data: ChatDataset, config: Any, ranks: int, rank: int, packs: int) -> DataLoader:
    """The usual way: as many samples a batch as packs have on average, at random, padded to the longest."""
    count = max(1, round(len(data) / packs / ranks))
    order = random.Random(0).sample(range(len(data)), len(data))
    batches = [order[first : first + count] for first in range(rank * count, len(order) - count + 1, ranks * count)]
    return DataLoader(data, batch_sampler=batches, collate_fn=partial(pad, join=JoinPack(data, config)))


def pad(samples: Sequence[dict[str, Any]], join: JoinPack) -> dict[str, Any]:
    """A batch [samples, longest] with its mask; the images are those of a pack."""
    alone = [join([sample]) for sample in samples]
    of_packs = ("cu_seq_lens", "max_length", "seq_idx")
    batch = {name: value for name, value in join(samples).items() if not name.startswith(of_packs)}
    for name, filler in (("input_ids", 0), ("labels", IGNORED), ("position_ids", 1)):
        rows = pad_sequence([one[name].movedim(-1, 0) for one in alone], batch_first=True, padding_value=filler)
        batch[name] = rows.movedim(1, -1).squeeze(1) if rows.dim() == 3 else rows[..., 0].permute(2, 0, 1)
    lengths = torch.tensor([one["input_ids"].shape[1] for one in alone])
    batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    of_image = (batch["input_ids"] == join.config.image_token_id).long()
    return batch | {name: of_image for name in join.takes if name.endswith("token_type_ids")}


if __name__ == "__main__":
    run_tool(main)
