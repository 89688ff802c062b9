"""Packs of given sizes and random content, for measuring."""

from collections.abc import Sequence

import torch

from megatron.vlm.microbatch import Microbatch
from omnibal_ext.architectures.architecture import Architecture


def synthetic_pack(architecture: Architecture, tiles: int, lengths: Sequence[int]) -> Microbatch:
    """A pack of samples of these lengths (tokens); image tokens in front, as far as they fit."""
    size, tokens = architecture.vision.image_size, sum(lengths)
    ids = torch.randint(0, architecture.language.vocab_size, (tokens,), device="cuda")
    image_tokens = torch.arange(min(tokens, tiles * architecture.image_tokens_per_tile), device="cuda")
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
    )


def equal_lengths(tokens: int, samples: int) -> list[int]:
    """`tokens` divided among samples as evenly as can be."""
    return [tokens // samples + (sample < tokens % samples) for sample in range(samples)]
