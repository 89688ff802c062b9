"""Corpora that packers are tested on."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from omnibal_ext.packing import Packs
from omnibal_ext.sizes import Sizes

REPOSITORY = Path(__file__).parents[3]
LENGTHS = Path(os.environ.get("OMNIBAL_LENGTHS", REPOSITORY.parent / "shared" / "data" / "lengths"))


def published_files() -> list[str]:
    """The three files of lengths that OmniBal's authors published; skips the test where they are absent."""
    files = sorted(str(path) for path in LENGTHS.glob("*_token_lengths.json"))
    if len(files) != 3:
        pytest.skip(f"the published lengths are not in {LENGTHS} (set OMNIBAL_LENGTHS)")
    return files


def corpora(max_tiles: int = 12, max_tokens: int = 400, max_samples: int = 80) -> st.SearchStrategy[Sizes]:
    """Small corpora of any shape: text-only samples, duplicates, samples as large as a budget."""
    sample = st.tuples(st.integers(0, max_tiles), st.integers(1, max_tokens))
    return st.lists(sample, min_size=1, max_size=max_samples).map(
        lambda rows: Sizes.from_arrays([tiles for tiles, _ in rows], [tokens for _, tokens in rows])
    )


def assert_partition(packs: Packs, samples: int) -> None:
    """Every sample is in exactly one pack, and no pack is empty."""
    assert np.array_equal(np.sort(packs.sample_ids), np.arange(samples))
    assert packs.pack_offsets[0] == 0
    assert packs.pack_offsets[-1] == samples
    assert (packs.counts > 0).all()


def heavy_tails(samples: int) -> Sizes:
    """30% text-only; lengths over three orders of magnitude; up to 12 tiles."""
    generator = np.random.default_rng(0)
    kind = generator.random(samples)
    tiles = np.where(kind < 0.3, 0, np.where(kind < 0.6, 1, generator.integers(1, 13, samples)))
    text = generator.lognormal(5.3, 1.0, samples).astype(np.int64) + 8
    return Sizes.from_arrays(tiles, np.minimum(text + 256 * tiles, 4096))


def single_tiles(samples: int) -> Sizes:
    """LLaVA-like: one tile a sample, 576 tokens and a conversation."""
    text = np.random.default_rng(0).lognormal(5.5, 0.6, samples).astype(np.int64).clip(30, 1400)
    return Sizes.from_arrays(np.ones(samples, np.int64), text + 576)


def many_images(samples: int) -> Sizes:
    """Up to 40 tiles a sample, most have few."""
    generator = np.random.default_rng(0)
    tiles = generator.zipf(1.6, samples).clip(1, 40)
    return Sizes.from_arrays(tiles, 256 * tiles + generator.lognormal(5, 1, samples).astype(np.int64).clip(10, 3000))


UNTUNED: dict[str, tuple[Callable[[int], Sizes], tuple[int, int]]] = {
    "heavy tails": (heavy_tails, (12, 4096)),
    "heavy tails, wide": (heavy_tails, (24, 8192)),
    "single tiles": (single_tiles, (8, 4096)),
    "many images": (many_images, (48, 16384)),
}
