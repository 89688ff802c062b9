"""Run on ranks: the model of examples/train_stream.py that hears, on batches as read and with three phases balanced.

stream_heard.py DATASET
    prints for every step of both ways: its loss, its samples' loss one by one through transformers alone, the largest
    difference of gradients from theirs over the largest gradient, and of each phase its fullest rank's share
"""

import copy
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.stream import AUDIO, VISION
from megatron.vlm.hf.packs import JoinPack
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.rebalance.phases import phases_of
from tests.programs import ROOT

STEPS = 2


def one_by_one(model: Any, data: ChatDataset, samples: list[dict[str, Any]]) -> Iterator[Tensor]:
    """The sum of each sample's losses; gradients add up in the model."""
    join = JoinPack(data, model.config)
    for sample in samples:
        loss = model(**join([sample])).loss * (sample["labels"][1:] != IGNORED).sum()
        loss.backward()
        yield loss.detach()


def difference(model: Any, alone: Any, counted: int) -> float:
    """The largest difference of gradients over the largest gradient."""
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    found = [(a.grad, b.grad / counted) for a, b in pairs if b.grad is not None]
    return max(float((a - b).abs().max()) for a, b in found) / max(float(b.abs().max()) for _, b in found)


def steps_of(example: Any, data: ChatDataset, model: Any, phases: Any) -> Iterator[dict[str, Any]]:
    ranks, wrapped = dist.get_world_size(), DistributedDataParallel(example.Phases(model), find_unused_parameters=True)
    read = [iter(example.Stream(data, model.config, rank, ranks)) for rank in range(ranks)]
    for step in islice(example.steps_of(data, model, phases), STEPS):
        model.zero_grad()
        (wrapped(step) * ranks / step.counted).backward()
        total = wrapped(step).detach() / step.counted
        dist.all_reduce(total)
        alone = copy.deepcopy(model)
        alone.zero_grad()
        samples = [sample for one in read for sample in islice(one, example.EACH)]
        wanted = sum(one_by_one(alone, data, samples), torch.tensor(0.0)) / step.counted
        shown = [torch.tensor([len(one) for one in (step.inputs[AUDIO]["input_features"], step.pixels)])]
        everyone = [torch.empty_like(shown[0]) for _ in range(ranks)]
        dist.all_gather(everyone, shown[0])
        yield {
            "loss": float(total), "alone": float(wanted), "gradients": difference(model, alone, step.counted),
            "placed": {phase: (one.after / one.before, one.stays) for phase, one in step.placed.items()},
            AUDIO: [int(one[0]) for one in everyone], VISION: [int(one[1]) for one in everyone],
        }  # fmt: skip


def main() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    import train_stream

    rank, _ = train_stream.start_ranks()
    data = ChatDataset(sys.argv[1])
    model = train_stream.load_model(data, Namespace(model=None, lora=None))
    phases = phases_of(PackCosts.of_model(audio_budget=1))
    result = {
        name: list(steps_of(train_stream, data, model, known)) for name, known in (("read", None), ("ours", phases))
    }
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
    train_stream.leave()


if __name__ == "__main__":
    main()
