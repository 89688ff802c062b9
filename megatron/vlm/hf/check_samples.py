"""Samples for --check (`hf/check.py`): random ones, or a dataset's."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.images import pixels_of
from megatron.vlm.data.media.tiles import Tiling, tile_image
from megatron.vlm.data.sample import Sample
from megatron.vlm.hf.further import FURTHER_INPUTS
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.errors import UserError
from omnibal_ext.families.media import TILINGS
from omnibal_ext.joining.positions import Grid
from omnibal_ext.modalities.modality import Size
from omnibal_ext.modalities.vision.architecture import NativeResolution
from omnibal_ext.modalities.vision.features import FeatureOrder

WORDS = 16
MOST_TILES = 36
"""Most tiles of an image that any model has."""
MOST_TRIED = 8
"""Samples of a dataset that are tried until one can be read."""
Sides = tuple[float, float]
IMAGES: tuple[tuple[Sides, ...], ...] = (((2.1, 1.3), (0.7, 1.9)), (), ((1.0, 1.0),))
"""Width and height of each random sample's images, in tiles; one sample has none."""


@dataclass(frozen=True)
class CheckSample:
    """Token ids, image tokens among them, and the images."""

    ids: Tensor
    """Token ids, int64 [T]."""
    pixels: Tensor
    """Float [tiles, 3, S, S]; at native resolution tiles are patches."""
    images: tuple[tuple[int, FeatureOrder], ...]
    """Number of features of each image, and which feature each of its tokens is."""
    sizes: tuple[tuple[int, int], ...]
    """Width and height of each image in pixels."""
    grids: tuple[Grid, ...]
    """(1, rows, columns) of each image's patches; only at native resolution."""
    starts: tuple[int, ...]
    """Index of each image's first token."""
    prefix: int = 0
    """Number of tokens before the answer, with bidirectional attention."""
    further: Mapping[Size, tuple[Tensor, ...]] = field(default_factory=dict)
    """Inputs beyond images, such as mel frames of sounds [frames, mel bins], as encoders read them."""


@dataclass(frozen=True)
class Tokens:
    """Ids of which random samples are made: the image token's, and those of words."""

    image: int
    words: Tensor
    """Ids of ordinary words, int64 [words]."""


def samples_of(folder: Path) -> list[CheckSample]:
    """Read the dataset's shortest samples with images, without, and with sounds, as far as there are some; samples with
    videos or unreadable images are skipped."""
    data = ChatDataset(folder)
    data.sources.refuse_foreign()
    order = np.argsort(data.sizes.tokens, kind="stable")
    images, *others = (column[order] > 0 for column in data.amounts.values())
    further = np.any([np.zeros(len(order), bool), *others], axis=0)
    groups = (order[images & ~further], order[~images & ~further], *(order[one] for one in others))
    shortest = (_first_readable(data, group) for group in groups)
    return [sample for sample in shortest if sample is not None]


def _first_readable(data: ChatDataset, samples: NDArray[np.int64]) -> CheckSample | None:
    without_videos = (one for one in map(data.sample, samples) if not any(image.film for image in one.images))
    for sample in islice(without_videos, MOST_TRIED):
        with suppress(UserError):  # the next sample may be readable
            return _of_dataset(data, sample)
    return None


def _of_dataset(data: ChatDataset, sample: Sample) -> CheckSample:
    images, per_tile = sample.images, data.manifest["tokens_per_tile"]
    return CheckSample(
        torch.from_numpy(sample.text[0].astype(np.int64)),
        pixels_of(sample),
        tuple((int(image.tiles * per_tile), order) for image, order in zip(images, sample.orders, strict=True)),
        tuple((image.width, image.height) for image in images),
        tuple(grid for image in images for grid in image.grids) if data.rule.native else (),
        tuple(sample.image_starts) if images else (),
        sample.prefix if data.rule.prefix_attention else 0,
        {
            one.size: tuple(data.readers[one.size].values(sample, item) for item in sample.items(one))
            for one in data.modalities[1:]
        },
    )


def random_samples(architecture: Architecture, image_token: int, meant: Collection[int] = ()) -> list[CheckSample]:
    """Draw samples of random tokens and pixels, with images of the sizes in `IMAGES`, and what else the model takes.

    `meant`: further ids that stand for something else than words, which are not drawn.
    """
    native = architecture.vision.native
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(IMAGES))]
    others = architecture.prompt.further_token_ids.values()
    tokens = Tokens(image_token, _words_but(architecture, {image_token, *others, *meant}))
    made = [
        _at_native_resolution(native, architecture.vision.patch_size, sizes, tokens, generator)
        if native
        else _of_tiles(architecture, sizes, tokens, generator)
        for sizes, generator in zip(IMAGES, generators, strict=True)
    ]
    return [
        _with_further(sample, number, architecture, generator)
        for number, (sample, generator) in enumerate(zip(made, generators, strict=True))
    ]


def _with_further(
    sample: CheckSample, number: int, architecture: Architecture, generator: torch.Generator
) -> CheckSample:
    """Append random inputs of the model's other encoders, such as sounds, and a word behind each, to a sample."""
    parts, further = [sample.ids], dict[Size, tuple[Tensor, ...]]()
    for one in architecture.further:
        size = one.modality.size
        token = architecture.prompt.further_token_ids[size]
        further[size] = FURTHER_INPUTS[size].random(architecture, number, generator)
        for values in further[size]:
            parts += [torch.full((one.encoder.tokens(len(values)),), token), sample.ids[:1]]
    return replace(sample, ids=torch.cat(parts), further=further)


def _of_tiles(
    architecture: Architecture, sides: tuple[Sides, ...], tokens: Tokens, generator: torch.Generator
) -> CheckSample:
    tile, per_tile = architecture.vision.image_size, architecture.image_tokens_per_tile
    sizes = tuple((round(width * tile), round(height * tile)) for width, height in sides)
    rule = architecture.prompt.tiling if architecture.newline else "fixed"
    tiling = Tiling(tile, 1, MOST_TILES, architecture.newline, rule)
    images = [tile_image("", size, len(sizes), tiling) for size in sizes]
    orders = [TILINGS[rule].order(image, per_tile) for image in images]
    ids, starts = _words_around(list(map(len, orders)), tokens, generator)
    pixels = torch.randn(sum(image.tiles for image in images), 3, tile, tile, generator=generator)
    features = tuple((image.tiles * per_tile, order) for image, order in zip(images, orders, strict=True))
    prefix = len(ids) - WORDS // 2 if any(one.sees_prefix for one in architecture.language.attentions) else 0
    return CheckSample(ids, pixels, features, sizes, (), starts, prefix)


def _at_native_resolution(
    native: NativeResolution, size: int, sides: tuple[Sides, ...], tokens: Tokens, generator: torch.Generator
) -> CheckSample:
    """Draw a sample with images of these `sides` in tiles: a tile's side has three squares of patches."""
    squares = [(max(1, round(3 * width)), max(1, round(3 * height))) for width, height in sides]
    grids = tuple((1, rows * native.merge, columns * native.merge) for columns, rows in squares)
    counts = [columns * rows for columns, rows in squares]
    ids, starts = _words_around(counts, tokens, generator)
    patches = sum(rows * columns for _, rows, columns in grids)
    pixels = torch.randn(patches, 3, size, size, generator=generator)
    features = tuple((count, FeatureOrder(np.arange(count))) for count in counts)
    return CheckSample(ids, pixels, features, tuple((columns, rows) for _, rows, columns in grids), grids, starts)


def _words_around(counts: list[int], tokens: Tokens, generator: torch.Generator) -> tuple[Tensor, tuple[int, ...]]:
    """Draw tokens before, between and after the images' tokens; also return the index of each image's first one."""
    ids, starts = [_some(tokens.words, generator)], []
    for count in counts:
        starts.append(sum(map(len, ids)))
        ids += [torch.full((count,), tokens.image), _some(tokens.words, generator)]
    return torch.cat(ids), tuple(starts)


def _some(words: Tensor, generator: torch.Generator) -> Tensor:
    return words[torch.randint(0, len(words), (WORDS,), generator=generator)]


def _words_but(architecture: Architecture, others: Collection[int | None]) -> Tensor:
    """Return all ids of the vocabulary but these, int64 [words]."""
    words = torch.arange(architecture.language.vocab_size)
    return words[~torch.isin(words, torch.tensor([token for token in others if token is not None]))]
