"""Corpora that packers are tested on."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from omnibal_ext.packing.packs import PackList, pack_loads
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


def mix(samples: int, seed: int = 0) -> Sizes:
    """Words alone, images, sounds, and both: patches, mel frames and tokens of Qwen2.5-Omni."""
    random = np.random.default_rng(seed)
    kind = random.choice(4, samples, p=[0.3, 0.3, 0.3, 0.1])
    tiles = 4 * random.integers(64, 700, samples) * np.isin(kind, (1, 3))
    frames = np.minimum(random.lognormal(6.6, 0.8, samples).astype(np.int64) + 8, 6000) * np.isin(kind, (2, 3))
    words = np.minimum(random.lognormal(5.2, 0.8, samples).astype(np.int64) + 8, 4000)
    return Sizes.from_arrays(tiles, words + tiles // 4 + frames // 4, frames=frames)


def made_up_manifest(**fields: Any) -> dict[str, Any]:
    """What an index says of packs that no packer made; the files' own counts come with writing it."""
    usual: dict[str, Any] = {"method": "balanced", "pad": False, "last_iteration": "next_epoch", "seed": 3}
    budgets = ("vit_budget", "llm_budget", "sample_vit_budget", "sample_llm_budget")
    return {**usual, **dict.fromkeys(budgets, 1), "rejected": 0, "sources": [], "built_from": {}, **fields}


def assert_partition(packs: PackList, samples: int) -> None:
    """Every sample is in exactly one pack, and no pack is empty."""
    assert np.array_equal(np.sort(packs.sample_ids), np.arange(samples))
    assert packs.pack_offsets[0] == 0
    assert packs.pack_offsets[-1] == samples
    assert (packs.counts > 0).all()


def assert_packed(packs: PackList, sizes: Sizes, *budgets: int) -> None:
    """And none is beyond the budgets of tiles and tokens."""
    assert_partition(packs, len(sizes))
    assert (pack_loads(packs, sizes)[:, :2] <= budgets).all()


def samples_of(packs: PackList) -> list[NDArray[np.int64]]:
    """Those of each pack."""
    return np.split(packs.sample_ids, packs.pack_offsets[1:-1])


def drawn(samples: int, tiles: int, tokens: tuple[int, int], seed: int = 0) -> Sizes:
    """Tiles below `tiles`, tokens from one number to below the other."""
    random = np.random.default_rng(seed)
    return Sizes.from_arrays(random.integers(0, tiles, samples), random.integers(*tokens, samples))


def first_fit_packs(
    sizes: NDArray[np.int64], budgets: NDArray[np.int64], key: NDArray[np.float64] | None = None
) -> int:
    """Packs of first-fit-decreasing by `key`, or the larger share of a budget, every pack looked at."""
    rooms: list[NDArray[np.int64]] = []
    key = (sizes / np.maximum(1, budgets)).max(axis=1) if key is None else key
    for sample in np.argsort(-key, kind="stable"):
        place = next((i for i, room in enumerate(rooms) if (room >= sizes[sample]).all()), len(rooms))
        rooms[place:] = [(budgets if place == len(rooms) else rooms[place]) - sizes[sample], *rooms[place + 1 :]]
    return len(rooms)


def spread_against_random(iterations: NDArray[np.int64], values: NDArray[Any]) -> NDArray[np.float64]:
    """Deviation of iterations' [I, B] sums of packs' values [P, F] over that of a random order, [F].

    A sum of B draws without replacement from P has B (P - B) / (P - 1) times the variance of one draw.
    """
    batch, packs = iterations.shape[1], len(values)
    sums = values[iterations].sum(axis=1) - values.mean(axis=0) * batch
    random = values.var(axis=0) * batch * (packs - batch) / (packs - 1)
    found: NDArray[np.float64] = np.sqrt((sums**2).mean(axis=0) / np.where(random > 0, random, np.inf))
    return found
