"""A model of transformers on balanced packs with plain PyTorch DDP; then the same on random padded batches.

    torchrun --nproc-per-node 2 examples/train_ddp.py --data DATA --packs PACKS --model FOLDER --steps 20

The loss is the mean over the global batch's counted tokens, whatever pack they are in: each rank divides by the sum
over all ranks. The last line is samples a second on packs over those on random batches, in the same run.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from transformers_packs import counted, leave, load_model, loader, loss_of, parser, steps, trained

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.hf.packs import JoinPack
from omnibal_ext.errors import run_tool


def main() -> None:
    """Train on packs, then on random batches of as many samples."""
    arguments = parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = ChatDataset(arguments.data)
    speeds = {}
    for name in ("packs", "random batches"):
        model = load_model(data, arguments)
        packs = loader(data, model.config, arguments.packs, ranks, rank)
        micro_batches = packs.batch_sampler.micro_batches
        batches = packs if name == "packs" else list(random_batches(data, model.config, ranks, rank, len(packs)))
        losses, samples, seconds = train(model, steps(batches, micro_batches, arguments.steps), arguments.lr)
        speeds[name] = samples / seconds
        if rank == 0:
            print(f"{name}: loss {losses[0]:.6f} to {losses[-1]:.6f}, {samples} samples, {speeds[name]:.1f} a second")
    if rank == 0:
        print(f"packs / random batches samples per second: {speeds['packs'] / speeds['random batches']:.2f}x")
    leave()


def train(model: torch.nn.Module, steps: Iterator[list[dict[str, Any]]], lr: float) -> tuple[list[float], int, float]:
    """Losses of the steps, samples of all ranks, seconds."""
    # A pack without images leaves the ViT without gradients: DDP is told to expect that.
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(trained(model), lr=lr)
    losses, samples, started = [], 0, time.perf_counter()
    for step in steps:
        optimizer.zero_grad()
        losses.append(float(backward(wrapped, step)))
        optimizer.step()
        read = torch.tensor(sum(map(samples_of, step)))
        dist.all_reduce(read)
        samples += int(read)
    return losses, samples, time.perf_counter() - started


def backward(wrapped: DistributedDataParallel, step: list[dict[str, Any]]) -> Tensor:
    """The loss of a step, the mean over its counted tokens on all ranks; its gradients are added."""
    tokens, total = counted(step), torch.tensor(0.0)
    dist.all_reduce(tokens)
    for number, batch in enumerate(step, start=1):
        with nullcontext() if number == len(step) else wrapped.no_sync():
            labels = batch["labels"]
            loss = loss_of(wrapped(**{**batch, "labels": None}), labels, tokens)
            (loss * dist.get_world_size()).backward()  # of which DDP takes the mean over ranks
            total += loss.detach()
    dist.all_reduce(total)
    return total


def samples_of(batch: dict[str, Any]) -> int:
    """Each begins at position 0."""
    positions = batch["position_ids"]
    return int((positions if positions.dim() == 2 else positions[0]).eq(0).sum())


def random_batches(data: ChatDataset, config: Any, ranks: int, rank: int, packs: int) -> Iterator[dict[str, Any]]:
    """The usual way: as many samples a batch as packs have on average, at random, padded to the longest."""
    count, join = max(1, round(len(data) / packs / ranks)), JoinPack(data, config)
    order = random.Random(0).sample(range(len(data)), len(data))
    for first in range(rank * count, len(order) - count + 1, ranks * count):
        yield pad([data[sample] for sample in order[first : first + count]], join)


def pad(samples: Sequence[dict[str, Any]], join: JoinPack) -> dict[str, Any]:
    """A batch [samples, longest] with its mask; the images are those of a pack."""
    alone = [join([sample]) for sample in samples]
    batch = {name: value for name, value in join(samples).items() if not name.startswith(("cu_seq_lens", "max_length"))}
    for name, filler in (("input_ids", 0), ("labels", IGNORED), ("position_ids", 1)):
        rows = pad_sequence([one[name].movedim(-1, 0) for one in alone], batch_first=True, padding_value=filler)
        batch[name] = rows.movedim(1, -1).squeeze(1) if rows.dim() == 3 else rows[..., 0].permute(2, 0, 1)
    lengths = torch.tensor([one["input_ids"].shape[1] for one in alone])
    batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    if join.config.model_type == "gemma3":
        batch["token_type_ids"] = (batch["input_ids"] == join.config.image_token_id).long()
    return batch


if __name__ == "__main__":
    run_tool(main)
