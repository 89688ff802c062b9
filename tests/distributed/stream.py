"""Run on ranks that read samples of their own: balanced batches have the samples, loss and gradients of those as read.

stream.py SAMPLES_OF_THE_LAST_RANK [hears]
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
from megatron.vlm.data.stream import AUDIO, LANGUAGE, VISION, StreamStep, StreamSteps
from omnibal_ext.rebalance.phases import Phase

EACH, STEPS, TOKENS_PER_TILE, WIDTH, IMAGE, SOUND, BINS = 3, 4, 2, 5, 0, 50, 3
PHASES = {AUDIO: Phase(1.0), VISION: Phase(1.0), LANGUAGE: Phase(1.0, 0.01)}


def samples_of(rank: int, count: int, hears: bool = False) -> Iterator[dict[str, Tensor]]:
    """Samples that say who they are; those of rank 0 are large, those of rank 1 have no images, and if they hear rank
    1's are long and rank 2's are silent."""
    for number in range(count):
        generator = torch.Generator().manual_seed(100 * rank + number)
        tiles = [6, 0][rank] if rank < 2 else int(torch.randint(4, (), generator=generator))
        text = int(torch.randint(2, 30, (), generator=generator))
        ids = torch.cat([torch.tensor([1000 * (rank + 1) + number]), torch.full((tiles * TOKENS_PER_TILE,), IMAGE),
                         torch.randint(1, 50, (text,), generator=generator)])  # fmt: skip
        labels = torch.where(torch.rand(len(ids), generator=generator) < 0.5, ids, IGNORED)
        pixels = torch.rand(tiles, 3, 2, 2, generator=generator)
        sample = {"input_ids": ids, "labels": labels, "pixel_values": pixels}
        yield with_sounds(sample, rank, generator) if hears else sample


def with_sounds(sample: dict[str, Tensor], rank: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The sample with sounds behind its words, and positions of two numbers: that in the sample, and what it counts."""
    count = {1: 3, 2: 0}.get(rank, 1)
    lengths = 2 * torch.randint(1, 4, (count,), generator=generator)
    heard = torch.full((int(lengths.sum()) // 2,), SOUND)
    ids, labels = torch.cat([sample["input_ids"], heard]), torch.cat([sample["labels"], heard])
    return sample | {
        "input_ids": ids, "labels": labels, "feature_lengths": lengths,
        "input_features": torch.rand(int(lengths.sum()), BINS, generator=generator),
        "position_ids": torch.stack([torch.arange(len(ids)), ids * 7 % 11], dim=1),
    }  # fmt: skip


def run(step: StreamStep, weights: list[Tensor]) -> tuple[Tensor, list[int]]:
    """The sum of losses of the samples here: towers and a model of one weight each; and which samples these are."""
    tower, words, ear = weights
    heard = features = torch.zeros(0, WIDTH, requires_grad=True)
    if AUDIO in step.inputs:
        mels, lengths = step.inputs[AUDIO].values()
        if len(mels):  # a row of two frames knows those before it in its sound
            heard = torch.cat([one.cumsum(0)[1::2] for one in mels.split(lengths.tolist())]) @ ear
        heard = step.send(heard, AUDIO)
    if len(step.pixels):
        features = (step.pixels.flatten(1) @ tower).reshape(-1, WIDTH).tanh()
    features = step.send(features)
    if step.batch is None:
        return features.sum() + heard.sum(), []
    ids, labels = step.batch["input_ids"][0], step.batch["labels"][0]
    hidden = words[ids % 50].masked_scatter((ids == IMAGE)[:, None], features)
    if AUDIO in step.inputs:
        hidden = hidden.masked_scatter((ids == SOUND)[:, None], heard)
        hidden = hidden * step.batch["position_ids"][1, 0, :, None]
    ends = step.batch["cu_seq_lens_q"].tolist()
    within = torch.cat([part.cumsum(0) for part in hidden.split(torch.tensor(ends).diff().tolist())])
    counts = labels[1:] != IGNORED
    loss = ((within[:-1].sum(dim=1) - labels[1:] % 50) ** 2)[counts].sum()
    return loss, [int(ids[first]) for first in ends[:-1]]


def steps_of(count: int, phases: Any, hears: bool) -> list[dict[str, Any]]:
    """What came of every step, over all ranks."""
    found = []
    samples, mark = samples_of(dist.get_rank(), count, hears), SOUND if hears else None
    steps = StreamSteps(samples, EACH, TOKENS_PER_TILE, WIDTH, phases, ranks_per_node=2, audio_token=mark)
    for step in steps:
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(12, TOKENS_PER_TILE * WIDTH, generator=generator, requires_grad=True),
                   torch.randn(50, WIDTH, generator=generator, requires_grad=True),
                   torch.randn(BINS, WIDTH, generator=generator, requires_grad=True)]  # fmt: skip
        loss, names = run(step, weights)
        (loss / step.counted).backward()
        gradients = [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]
        total = loss.detach() / step.counted
        for tensor in (total, *gradients):
            dist.all_reduce(tensor)
        everyone: list[Any] = [None] * dist.get_world_size()
        frames = len(step.inputs[AUDIO]["input_features"]) if hears else 0
        dist.all_gather_object(everyone, (names, len(step.pixels), frames))
        found.append(
            {
                "loss": total.item(),
                "gradients": torch.cat([g.flatten() for g in gradients]).tolist(),
                "samples": [name for names, *_ in everyone for name in names],
                "tiles": [tiles for _, tiles, _ in everyone],
                "frames": [frames for *_, frames in everyone],
                "counted": step.counted,
            }
        )
    return found


def main() -> None:
    dist.init_process_group("gloo")
    last = dist.get_rank() == dist.get_world_size() - 1
    count = int(sys.argv[1]) if last else EACH * STEPS
    hears = sys.argv[2:] == ["hears"]
    result = {"as read": steps_of(count, None, hears), "balanced": steps_of(count, PHASES, hears)}
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
