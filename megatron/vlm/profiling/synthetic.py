"""Packs of given sizes and random content, for measuring."""

from collections.abc import Sequence
from math import isqrt

import torch

from megatron.vlm.microbatch import Grid, Microbatch
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.costs.analytic import IMAGE_PATCHES


def synthetic_pack(architecture: Architecture, tiles: int, lengths: Sequence[int]) -> Microbatch:
    """A pack of samples of these lengths (tokens); image tokens in front, as far as they fit.

    At native resolution `tiles` patches are images of up to `IMAGE_PATCHES`, nearly square.
    """
    grids = _grids(tiles, architecture.vision.native.merge) if architecture.vision.native else ()
    if grids:
        tiles = sum(rows * columns for _, rows, columns in grids)
    size, tokens = architecture.vision.image_size, sum(lengths)
    ids = torch.randint(0, architecture.language.vocab_size, (tokens,), device="cuda")
    image_tokens = torch.arange(min(tokens, architecture.image_tokens(tiles)), device="cuda")
    return Microbatch(
        tiles=tiles,
        lengths=tuple(lengths),
        samples=len(lengths),
        useful_tokens=tokens,
        pixels=torch.randn(tiles, 3, size, size, device="cuda"),
        input_ids=ids,
        image_positions=image_tokens,
        image_sources=image_tokens,
        labels=ids,
        loss_mask=torch.ones(tokens, device="cuda"),
        grids=grids,
    )


def _grids(patches: int, merge: int) -> tuple[Grid, ...]:
    found, left = [], patches
    while left >= merge**2:
        share = min(left, IMAGE_PATCHES)
        columns = isqrt(share) // merge * merge
        rows = share // columns // merge * merge
        found.append((1, rows, columns))
        left -= rows * columns
    return tuple(found)


def equal_lengths(tokens: int, samples: int) -> list[int]:
    """`tokens` divided among samples as evenly as can be."""
    return [tokens // samples + (sample < tokens % samples) for sample in range(samples)]
