"""Made-up corpora that no packer was tuned on."""

from collections.abc import Callable

import numpy as np

from omnibal_ext.sizes import Sizes


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


# name: how to make so many samples, and budgets for them
UNTUNED: dict[str, tuple[Callable[[int], Sizes], tuple[int, int]]] = {
    "heavy tails": (heavy_tails, (12, 4096)),
    "heavy tails, wide": (heavy_tails, (24, 8192)),
    "single tiles": (single_tiles, (8, 4096)),
    "many images": (many_images, (48, 16384)),
}
