"""Made-up corpora of ten kinds that no packer was tuned on, and budgets for them."""

from collections.abc import Callable

import numpy as np

from omnibal_ext.arrays import Ints
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


def videos(samples: int) -> Sizes:
    """A third are videos of 8 to 96 frames of 64 tokens each, the others single images."""
    generator = np.random.default_rng(0)
    tiles = np.where(generator.random(samples) < 0.33, generator.integers(1, 13, samples) * 8, 1)
    return Sizes.from_arrays(tiles, 64 * tiles + generator.lognormal(5, 0.8, samples).astype(np.int64).clip(10, 2000))


def near_budget(samples: int) -> Sizes:
    """Long conversations: half of the samples take more than a third of the tokens of a pack."""
    generator = np.random.default_rng(0)
    tiles = generator.integers(1, 6, samples)
    text = np.where(generator.random(samples) < 0.5, generator.uniform(1500, 2700, samples), 200).astype(np.int64)
    return Sizes.from_arrays(tiles, 256 * tiles + text)


def correlated(samples: int) -> Sizes:
    """Conversations that grow with their images."""
    generator = np.random.default_rng(0)
    tiles = generator.integers(1, 13, samples)
    return Sizes.from_arrays(tiles, (tiles * generator.normal(300, 15, samples)).astype(np.int64).clip(256, 4096))


def anti_correlated(samples: int) -> Sizes:
    """Many tiles with little to say, long texts with few tiles."""
    generator = np.random.default_rng(0)
    tiles = generator.integers(0, 13, samples)
    text = (13 - tiles) * generator.normal(220, 30, samples)
    return Sizes.from_arrays(tiles, text.astype(np.int64).clip(20, 4000) + 16 * tiles)


def independent(samples: int) -> Sizes:
    """Tiles and tokens that have nothing to do with each other."""
    generator = np.random.default_rng(0)
    return Sizes.from_arrays(generator.integers(0, 25, samples), generator.integers(20, 4000, samples))


def giants(samples: int) -> Sizes:
    """One sample in a hundred fills a pack alone."""
    generator = np.random.default_rng(0)
    giant = generator.random(samples) < 0.01
    tiles = np.where(giant, 40, generator.integers(0, 5, samples))
    tokens = np.where(giant, 14_000, 256 * tiles + generator.integers(30, 600, samples))
    return Sizes.from_arrays(tiles, np.where(giant, tokens + generator.integers(0, 2000, samples), tokens))


def two_points(samples: int) -> Sizes:
    """Two kinds of sample, each always the same."""
    large = np.random.default_rng(0).random(samples) < 0.3
    return Sizes.from_arrays(np.where(large, 7, 1), np.where(large, 2200, 450))


def patches(samples: int) -> Sizes:
    """Native resolution: patches instead of tiles, a quarter as many tokens, hardly two samples alike."""
    generator = np.random.default_rng(0)
    sides = generator.lognormal(3.3, 0.5, (2, samples)).clip(4, 120)
    count = (sides[0] * sides[1]).astype(np.int64) * 4
    text = generator.lognormal(4.5, 1, samples).astype(np.int64).clip(8, 2000)
    return Sizes.from_arrays(np.minimum(count, 32_768), np.minimum(count // 4 + text, 16_384))


def native(samples: int) -> Sizes:
    """Native resolution of wide photographs and pages, and a tenth words alone: tokens are scarcer than patches."""
    generator = np.random.default_rng(4)
    words_alone = generator.random(samples) < 0.1
    count = np.minimum(generator.lognormal(7.2, 0.8, samples).astype(np.int64) // 4 * 4 + 4, 16_384)
    count[words_alone] = 0
    text = generator.lognormal(5.3, 0.9, samples).astype(np.int64) + 8
    return Sizes.from_arrays(count, np.minimum(count // 4 + text, 8192))


def long_text(samples: int) -> Sizes:
    """Chats of about 720 tokens, and 2 of 939 samples evenly long from 2K to 128K: 16% of the tokens are over 16K."""
    generator = np.random.default_rng(1)
    chats = np.minimum(generator.lognormal(np.log(415), 1.05, samples), 32_768).astype(np.int64) + 16
    long = generator.uniform(2048, 131_072, max(1, round(samples * 2000 / 939_343))).astype(np.int64)
    return Sizes.from_arrays(np.zeros(len(chats) + len(long), np.int64), np.concatenate([chats, long]))


def films(samples: int) -> Sizes:
    """90% chats with an image or none, 7% documents of 2K to 32K, 3% films of 8K to 128K; tiles are patches."""
    generator = np.random.default_rng(1)
    kind = generator.choice(3, samples, p=[0.90, 0.07, 0.03])
    chat = generator.lognormal(np.log(650), 0.8, samples)
    document = np.exp(generator.uniform(np.log(2048), np.log(32_768), samples))
    film = np.exp(generator.uniform(np.log(8192), np.log(131_056), samples))
    tokens = np.choose(kind, [chat, document, film]).astype(np.int64) + 16
    pictured = np.choose(kind, [np.where(generator.random(samples) < 0.7, 0.5, 0.0), 0.9, 0.97])
    return Sizes.from_arrays((4 * pictured * tokens).astype(np.int64), tokens)


# name: how to make so many samples, and budgets for them
UNTUNED: dict[str, tuple[Callable[[int], Sizes], tuple[int, int]]] = {
    "heavy tails": (heavy_tails, (12, 4096)),
    "heavy tails, wide": (heavy_tails, (24, 8192)),
    "single tiles": (single_tiles, (8, 4096)),
    "many images": (many_images, (48, 16384)),
    "videos": (videos, (128, 12288)),
    "near budget": (near_budget, (12, 4096)),
    "correlated": (correlated, (32, 9216)),
    "anti-correlated": (anti_correlated, (24, 6144)),
    "independent": (independent, (48, 8192)),
    "giants": (giants, (48, 16384)),
    "two points": (two_points, (16, 5120)),
    "patches": (patches, (32_768, 16_384)),
    "native resolution": (native, (32_768, 16_384)),
}


def wide_lognormal(samples: int) -> Sizes:
    """Native resolution: patches over four orders of magnitude, words as widely."""
    generator = np.random.default_rng(11)
    return _with_words(generator, _patches(generator, 7.0, 1.0, samples), 5.3, 1.1, 8192)


def mostly_words(samples: int) -> Sizes:
    """Nine of ten are words alone."""
    generator = np.random.default_rng(11)
    pictured = generator.random(samples) >= 0.9
    return _with_words(generator, pictured * _patches(generator, 7.2, 0.8, samples), 6.0, 1.2, 16_000)


def rare_pictures(samples: int) -> Sizes:
    """One of a hundred has a picture, of a whole budget."""
    generator = np.random.default_rng(11)
    return _with_words(generator, np.where(generator.random(samples) < 0.01, 16_384, 0), 6.0, 1.0, 16_000)


def instructions(samples: int) -> Sizes:
    """Words alone, one image, pages, and several images, as instruction data have."""
    generator = np.random.default_rng(11)
    kind, few = generator.choice(4, samples, p=[0.22, 0.55, 0.13, 0.10]), generator.choice([1, 3, 5, 7], samples)
    tiles = np.choose(kind, [0 * few, few, generator.integers(7, 13, samples), generator.integers(2, 9, samples)])
    return Sizes.from_arrays(
        tiles, np.minimum(256 * tiles + generator.lognormal(5.4, 0.9, samples).astype(int) + 8, 8192)
    )


def tiles_or_words(samples: int) -> Sizes:
    """Many tiles have few words, many words have no tiles."""
    generator = np.random.default_rng(11)
    share = generator.random(samples)
    words = np.maximum(16, ((1 - share) ** 2 * 7000).astype(int) + generator.integers(0, 64, samples))
    return Sizes.from_arrays((share * 24).astype(int), words)


def zipf_lengths(samples: int) -> Sizes:
    """The longest fill a pack, most are tiny."""
    tokens = np.minimum(np.random.default_rng(11).zipf(1.5, samples) * 20 + 10, 16_384)
    return Sizes.from_arrays(np.where(tokens > 400, np.minimum(tokens // 300, 26), 0), tokens)


def over_a_half(samples: int) -> Sizes:
    """Most need more than a half of a pack, and few fit beside."""
    generator = np.random.default_rng(11)
    long, short = generator.integers(8200, 9000, samples), generator.integers(64, 3000, samples)
    return Sizes.from_arrays(np.zeros(samples, np.int64), np.where(generator.random(samples) < 0.6, long, short))


def _patches(generator: np.random.Generator, mean: float, deviation: float, samples: int) -> Ints:
    return np.minimum(generator.lognormal(mean, deviation, samples).astype(np.int64) // 4 * 4 + 4, 16_384)


def _with_words(generator: np.random.Generator, patches: Ints, mean: float, deviation: float, most: int) -> Sizes:
    words = generator.lognormal(mean, deviation, len(patches)).astype(np.int64) + 8
    return Sizes.from_arrays(patches, np.minimum(patches // 4 + words, most))


# Corpora that are hard to order; those whose tiles are patches also name a model
HARD: dict[str, tuple[Callable[[int], Sizes], tuple[int, int], str | None]] = {
    "native resolution": (native, (32_768, 16_384), "qwen3-vl-8b"),
    "wide lognormal": (wide_lognormal, (32_768, 16_384), "qwen3-vl-8b"),
    "mostly words": (mostly_words, (8192, 16_384), "qwen3-vl-8b"),
    "rare pictures": (rare_pictures, (16_384, 16_384), "qwen3-vl-8b"),
    "instructions": (instructions, (26, 8192), None),
    "tiles or words": (tiles_or_words, (26, 8192), None),
    "Zipf lengths": (zipf_lengths, (26, 16_384), None),
    "over a half": (over_a_half, (0, 16_384), None),
    "two points": (two_points, (16, 5120), None),
}
