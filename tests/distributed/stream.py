"""Run on ranks that read samples of their own: balanced batches have the samples, loss and gradients of those as read.

stream.py SAMPLES_OF_THE_LAST_RANK
    prints for every step of both ways: its loss, gradients, samples (their first word says which), and who is fullest
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.stream import LANGUAGE, VISION, StreamStep, StreamSteps
from omnibal_ext.rebalance.phases import Phase

EACH, STEPS, TOKENS_PER_TILE, WIDTH, IMAGE = 3, 4, 2, 5, 0
PHASES = {VISION: Phase(1.0), LANGUAGE: Phase(1.0, 0.01)}


def samples_of(rank: int, count: int) -> Iterator[dict[str, Tensor]]:
    """Samples that say who they are; the first ones of rank 0 are large, those of rank 1 are text."""
    for number in range(count):
        generator = torch.Generator().manual_seed(100 * rank + number)
        tiles = [6, 0][rank] if rank < 2 else int(torch.randint(4, (), generator=generator))
        text = int(torch.randint(2, 30, (), generator=generator))
        ids = torch.cat([torch.tensor([1000 * (rank + 1) + number]), torch.full((tiles * TOKENS_PER_TILE,), IMAGE),
                         torch.randint(1, 50, (text,), generator=generator)])  # fmt: skip
        labels = torch.where(torch.rand(len(ids), generator=generator) < 0.5, ids, IGNORED)
        pixels = torch.rand(tiles, 3, 2, 2, generator=generator)
        yield {"input_ids": ids, "labels": labels, "pixel_values": pixels}


def run(step: StreamStep, weights: list[Tensor]) -> tuple[Tensor, list[int]]:
    """The sum of losses of the samples here: a tower and a model of one weight each; and which samples these are."""
    tower, words = weights
    features = torch.zeros(0, WIDTH, requires_grad=True)
    if len(step.pixels):
        features = (step.pixels.flatten(1) @ tower).reshape(-1, WIDTH).tanh()
    features = step.send(features)
    if step.batch is None:
        return features.sum(), []
    ids, labels = step.batch["input_ids"][0], step.batch["labels"][0]
    hidden = words[ids % 50].masked_scatter((ids == IMAGE)[:, None], features)
    ends = step.batch["cu_seq_lens_q"].tolist()
    within = torch.cat([part.cumsum(0) for part in hidden.split(torch.tensor(ends).diff().tolist())])
    counts = labels[1:] != IGNORED
    loss = ((within[:-1].sum(dim=1) - labels[1:] % 50) ** 2)[counts].sum()
    return loss, [int(ids[first]) for first in ends[:-1]]


def steps_of(count: int, phases: Any) -> list[dict[str, Any]]:
    """What came of every step, over all ranks."""
    found = []
    steps = StreamSteps(samples_of(dist.get_rank(), count), EACH, TOKENS_PER_TILE, WIDTH, phases, ranks_per_node=2)
    for step in steps:
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(12, TOKENS_PER_TILE * WIDTH, generator=generator, requires_grad=True),
                   torch.randn(50, WIDTH, generator=generator, requires_grad=True)]  # fmt: skip
        loss, names = run(step, weights)
        (loss / step.counted).backward()
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        total = loss.detach() / step.counted
        for tensor in (total, *gradients):
            dist.all_reduce(tensor)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (names, len(step.pixels)))
        found.append(
            {
                "loss": total.item(),
                "gradients": torch.cat([g.flatten() for g in gradients]).tolist(),
                "samples": [name for names, _ in everyone for name in names],
                "tiles": [tiles for _, tiles in everyone],
                "counted": step.counted,
            }
        )
    return found


def main() -> None:
    dist.init_process_group("gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    count = int(sys.argv[1]) if last else EACH * STEPS
    result = {"as read": steps_of(count, None), "balanced": steps_of(count, PHASES)}
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
