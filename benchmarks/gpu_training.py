"""Some iterations of the trainer on packs of random content: a part of `benchmarks/gpu.py`.

All of a run is there but data and saves: Megatron's loop, wrappers and distributed optimizer, our schedule and meters.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from megatron.vlm import platform
from megatron.vlm.arguments import parse_arguments
from megatron.vlm.data.arrival import tensors
from megatron.vlm.data.loader import Packs
from megatron.vlm.microbatch import Microbatch, segment_ids
from megatron.vlm.pretrain import Trainer, train
from megatron.vlm.profiling.synthetic import equal_lengths, synthetic_pack
from megatron.vlm.single import alone_unless_told
from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.measured import device_key

MICROBATCHES = 4


@dataclass
class RandomPacks(Dataset):
    """The same few packs again and again, one of them without images, on the host as the loader lays them out."""

    model: str
    tiles: int
    tokens: int
    reads_images = False

    def __getitem__(self, number: int) -> Microbatch:
        number %= MICROBATCHES
        torch.manual_seed(number)
        tiles = self.tiles if number else 0
        pack = synthetic_pack(preset(self.model), tiles, equal_lengths(self.tokens, 4))
        here: dict[str, Any] = {name: tensor.cpu() for name, tensor in tensors(pack).items()}
        return replace(
            pack,
            **here,
            segment_ids=segment_ids(pack.lengths),
            sources=torch.zeros(4, dtype=torch.long),
            sample_ids=(number,) * 4,
        )


class RandomTrainer(Trainer):
    """The trainer on them."""

    def __init__(self, inputs: Any, packs: RandomPacks) -> None:
        super().__init__(inputs)
        self.random_packs = packs

    @staticmethod
    def sources(data: str | None) -> tuple[str, ...]:
        """One for all."""
        return ("random",)

    def datasets(self, *_: Any, **__: Any) -> tuple[Iterator[Microbatch], None, None]:
        """The packs, without end."""
        self.meter.start(self.args.train_iters, 0, 1.0)
        self.packs[True].append(Packs(self.random_packs, count(), 0))
        return self.packs[True][-1], None, None


def training(model: str, budgets: tuple[int, int], iterations: int) -> dict[str, Any]:
    """Losses, seconds an iteration, and the most bytes, beside those of an analytic profile."""
    alone_unless_told()
    packs = RandomPacks(model, *budgets)
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        words = ["--model", model, "--bf16", "--lr", "1e-4", "--train-iters", str(iterations), "--log-interval", "1"]
        words += ["--global-batch-size", str(MICROBATCHES), "--use-distributed-optimizer", "--overlap-grad-reduce"]
        words += ["--overlap-param-gather", "--metrics-file", str(metrics)]
        sys.argv[1:] = words
        inputs = parse_arguments(words)
        platform.take_device()
        train(RandomTrainer(inputs, packs))
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    pace = [record["samples_per_second"] for record in records if "loss" in record]
    settled = sorted(pace[len(pace) // 2 :])
    found = {
        "first loss": losses[0],
        "last loss": losses[-1],
        "seconds an iteration": 4 * MICROBATCHES / settled[len(settled) // 2],
        "peak bytes": platform.peak_bytes(),
    }
    return found | planned(model, budgets)


def planned(model: str, budgets: tuple[int, int]) -> dict[str, float]:
    """What an analytic profile says of such an iteration on this device; {} where its peaks are not known."""
    key = device_key(platform.device_name())
    if key is None:
        return {}
    architecture = preset(model)
    profile = analytic_profile(architecture, key, *budgets)
    layers = [profile.layers[kind] for kind in architecture.chain]
    work = MICROBATCHES * sum(layer.forward_seconds + layer.backward_seconds for layer in layers)
    return {
        "planned seconds": work + sum(layer.step_seconds for layer in layers),
        "planned bytes": sum(layer.weight_bytes + layer.kept_bytes for layer in layers),
    }
