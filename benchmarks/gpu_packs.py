"""Packs of made-up samples: what `benchmarks/gpu.py` trains on, without files.

Sizes as conversations have them: a fifth are words alone, most have an image, some two or three; words by a log-normal
distribution. They are packed by the packer, to budgets.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron.vlm.media import Images, together
from megatron.vlm.microbatch import Microbatch, segment_ids
from megatron.vlm.pixels import PixelStatistics
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.presets import preset
from omnibal_ext.modalities.modality import VISION
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes

IMAGES = ((0, 1, 2, 3), (0.2, 0.6, 0.12, 0.08))
"""How many a sample has, and how often."""
TILES = (2, 3, 3, 5, 7, 7, 9, 13)
"""Of an image."""
LEARNT = 0.3
"""Share of a sample's tokens that are learnt, at its end."""
HALF: PixelStatistics = ((0.5,) * 3, (0.5,) * 3)
Sample = tuple[int, int]
"""(tiles, tokens), the tokens of its images counted."""
Packs = list[list[Sample]]


def make_packs(architecture: Architecture, budgets: tuple[int, int], count: int, seed: int = 0) -> Packs:
    """Balanced packs, about `count` or more of them, of samples that fit; words shrink with a small budget."""
    vit, llm = budgets
    numbers = np.random.default_rng(seed)
    samples = 12 * count
    images = numbers.choice(IMAGES[0], samples, p=IMAGES[1])
    tiles = np.array([min(vit, sum(numbers.choice(TILES, number))) for number in images])
    words = 8 + np.minimum(numbers.lognormal(5.3, 0.9, samples), 2500) * llm / 11840
    tokens = words.astype(np.int64) + [architecture.image_tokens(number) for number in tiles.tolist()]
    fits = tokens <= llm
    sizes = Sizes.from_arrays(tiles[fits], tokens[fits])
    with TemporaryDirectory() as folder:
        options = PackOptions(
            vit_budget=vit, llm_budget=llm, micro_batches=min(8, count), pipeline_model_parallel_size=1
        )
        index = build_index(sizes, Path(folder) / "packs", options)[0]
        of_packs = [index.sample_ids[slice(*index.pack_offsets[n : n + 2])] for n in range(index.num_packs)]
        return [[(int(sizes.tiles[one]), int(sizes.tokens[one])) for one in pack] for pack in of_packs]


def words_alone(budgets: tuple[int, int], count: int) -> Packs:
    """Packs of four samples each that have no image and fill the language budget."""
    return [[(0, budgets[1] // 4)] * 4] * count


def read_packs(path: Path) -> Packs:
    """Those that another process has written."""
    return [[(tiles, tokens) for tiles, tokens in pack] for pack in json.loads(path.read_text())]


@dataclass(frozen=True)
class RandomPacks(Dataset):
    """Packs of random content on the host, as the loader lays them out; again from the first behind the last."""

    model: str
    packs: tuple[tuple[Sample, ...], ...]
    reads_media = False

    def __getitem__(self, number: int) -> Microbatch:
        return _microbatch(self.model, self.packs[number % len(self.packs)], number % len(self.packs))


@cache
def _microbatch(model: str, samples: tuple[Sample, ...], number: int) -> Microbatch:
    architecture, numbers = preset(model), np.random.default_rng(number)
    tiles, lengths = sum(t for t, _ in samples), [tokens for _, tokens in samples]
    starts = np.cumsum([0, *lengths])
    shown = [architecture.image_tokens(t) for t, _ in samples]
    pictured = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, shown, strict=False)])
    learnt = np.zeros(starts[-1], np.float32)
    for end, length in zip(starts[1:], lengths, strict=True):
        learnt[end - max(1, int(LEARNT * length)) : end] = 1
    size, ids = architecture.vision.image_size, torch.from_numpy(numbers.integers(0, 1000, starts[-1]))
    ids %= architecture.language.vocab_size
    mask = torch.from_numpy(learnt)
    images = Images(
        pieces=together(tiles),
        values=torch.from_numpy(numbers.integers(0, 256, (tiles, size, size, 3), np.uint8)),
        positions=torch.from_numpy(pictured),
        statistics=HALF,
    )
    return Microbatch(
        lengths=tuple(lengths),
        samples=len(samples),
        useful_tokens=sum(lengths),
        useful_squares=sum(length**2 for length in lengths),
        media={VISION.size: images},
        input_ids=ids,
        labels=ids,
        supervised=mask.nonzero().squeeze(1),
        loss_mask=mask,
        segment_ids=segment_ids(lengths),
        sources=torch.zeros(len(lengths), dtype=torch.long),
        pack=number,
        sample_ids=(number,) * len(samples),
    )
