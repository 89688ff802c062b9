"""Packs with random content, for measuring."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isqrt
from typing import Any

import torch

from megatron.vlm.microbatch import Grid, Microbatch
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.audio import AudioArchitecture
from omnibal_ext.architectures.vision import NativeResolution
from omnibal_ext.costs.works import IMAGE_PATCHES

SOUND_FRAMES = 3000
"""Mel frames of a sound: half a minute."""


def synthetic_pack(architecture: Architecture, tiles: int, lengths: Sequence[int], frames: int = 0) -> Microbatch:
    """A pack of samples of these lengths (tokens) that begins with as many image tokens as fit.

    At native resolution `tiles` is the number of patches, in nearly square images of up to `IMAGE_PATCHES`. `frames`:
    mel frames of the first sample's sounds, whose tokens are at the end; more of them than the pack has overwrite each
    other.
    """
    size, tokens = architecture.vision.image_size, sum(lengths)
    grids: tuple[Grid, ...] = ()
    if architecture.vision.native:
        grids, starts = _images(architecture.vision.native, tiles, tokens)
    else:
        starts = _tile_starts(architecture, tiles, lengths)
    if grids:
        tiles = sum(rows * columns for _, rows, columns in grids)
    ids = torch.randint(0, architecture.language.vocab_size, (tokens,), device="cuda")
    image_tokens = torch.arange(min(tokens, architecture.image_tokens(tiles)), device="cuda")
    heard = _sounds(architecture.audio, frames, tokens, len(lengths)) if architecture.audio else {}
    return Microbatch(
        tiles=tiles,
        lengths=tuple(lengths),
        samples=len(lengths),
        useful_tokens=tokens,
        prefixes=tuple(lengths),
        pixels=torch.randn(tiles, 3, size, size, device="cuda"),
        input_ids=ids,
        image_positions=image_tokens,
        image_sources=image_tokens,
        labels=ids,
        loss_mask=torch.ones(tokens, device="cuda"),
        grids=grids,
        image_starts=starts,
        **heard,
    )


def _sounds(audio: AudioArchitecture, frames: int, tokens: int, samples: int) -> dict[str, Any]:
    """The fields of a `Microbatch` with sounds of so many mel frames."""
    each = tuple(min(SOUND_FRAMES, frames - begin) for begin in range(0, frames, SOUND_FRAMES))
    heard = torch.arange(sum(map(audio.tokens, each)), device="cuda")
    return {
        "sounds": (each, *[()] * (samples - 1)),
        "mels": torch.randn(frames, audio.mel_bins, device="cuda"),
        "audio_positions": tokens - 1 - heard % tokens,
    }


def _tile_starts(architecture: Architecture, tiles: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """First token of each tile whose tokens are all in one sample."""
    edges, per_tile = [0, *accumulate(lengths)], architecture.image_tokens_per_tile
    starts = (tile * per_tile for tile in range(tiles))
    return tuple(start for start in starts if any(a <= start and start + per_tile <= b for a, b in pairwise(edges)))


def _images(native: NativeResolution, patches: int, tokens: int) -> tuple[tuple[Grid, ...], tuple[int, ...]]:
    """(grids, first token of each image); `tokens`, the sequence's end, for an image that does not fit."""
    merge, grids, starts, left, begin = native.merge, [], [], patches, 0
    while left >= merge**2:
        most = min(left, IMAGE_PATCHES)
        columns = isqrt(most) // merge * merge
        rows = most // columns // merge * merge
        end = begin + rows * columns // merge**2
        grids.append((1, rows, columns))
        starts.append(begin if end <= tokens else tokens)
        left -= rows * columns
        begin = end
    return tuple(grids), tuple(starts)


def equal_lengths(tokens: int, samples: int) -> list[int]:
    """Lengths of `samples` samples with `tokens` in all, as equal as possible."""
    return [tokens // samples + (sample < tokens % samples) for sample in range(samples)]
