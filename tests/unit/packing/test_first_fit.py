"""First-fit-decreasing: what the textbook's loop over all packs gives, in any number of sizes."""

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from omnibal_ext.packing import pack_loads
from omnibal_ext.packing.balanced import pack_balanced
from omnibal_ext.packing.first_fit import pack_first_fit
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import assert_partition

Ints = NDArray[np.int64]


def textbook(sizes: Ints, budgets: Ints, key: NDArray[np.float64]) -> int:
    """Packs of first-fit-decreasing by a key, every pack looked at."""
    rooms: list[Ints] = []
    for sample in np.argsort(-key, kind="stable"):
        for room in rooms:
            if (room >= sizes[sample]).all():
                room -= sizes[sample]
                break
        else:
            rooms.append(budgets - sizes[sample])
    return len(rooms)


@pytest.mark.parametrize("dimensions", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(8))
def test_no_more_packs_than_the_textbook(seed: int, dimensions: int) -> None:
    generator = np.random.default_rng(seed)
    budgets = generator.integers(50, 5000, dimensions)
    sizes = (generator.beta(1, 3, (400, dimensions)) * budgets).astype(np.int64)
    packs = pack_first_fit(sizes, budgets)
    assert_partition(packs, 400)
    assert (np.add.reduceat(sizes[packs.sample_ids], packs.pack_offsets[:-1]) <= budgets).all()
    assert len(packs) <= textbook(sizes, budgets, (sizes / budgets).sum(axis=1))
    assert len(packs) <= textbook(sizes, budgets, (sizes / budgets).max(axis=1)) * 1.01


@pytest.mark.parametrize("budgets", [(12, 4096), (40, 2000), (32_768, 8192)])
@pytest.mark.parametrize("shape", ["independent", "alike", "opposite"])
def test_balanced_packs_are_never_more(budgets: tuple[int, int], shape: str) -> None:
    generator = np.random.default_rng(0)
    share = generator.beta(1.2, 4, 1500)
    others = {"independent": generator.beta(1.2, 4, 1500), "alike": share, "opposite": 0.6 * (1 - share)}[shape]
    sizes = Sizes.from_arrays((share * budgets[0]).astype(int), np.maximum(1, (others * budgets[1]).astype(int)))
    packs = pack_balanced(sizes, *budgets, seed=0)
    assert_partition(packs, len(sizes))
    assert (pack_loads(packs, sizes)[:, :2] <= budgets).all()
    matrix = np.column_stack([sizes.tiles.astype(np.int64), sizes.tokens])
    for key in ((matrix / budgets).sum(axis=1), (matrix / budgets).max(axis=1), matrix[:, 1] / budgets[1]):
        assert len(packs) <= textbook(matrix, np.array(budgets), key)


def test_patches_are_packed_as_fast_as_tiles() -> None:
    """50,000 samples of which no two have as many patches; a table as high as the budget would take minutes."""
    generator = np.random.default_rng(0)
    patches = generator.permutation(32_768)[np.arange(50_000) % 32_768] // 8 + 1
    sizes = Sizes.from_arrays(patches * 4, patches + generator.lognormal(4.5, 1, 50_000).astype(int).clip(8, 2000))
    pack_balanced(sizes.take(np.arange(100)), 32_768, 16_384, seed=0)  # compile
    begin = time.process_time()
    packs = pack_balanced(sizes, 32_768, 16_384, seed=0)
    assert time.process_time() - begin < 10
    assert_partition(packs, len(sizes))
