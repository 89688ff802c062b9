"""First-fit-decreasing: what the textbook's loop over all packs gives, in any number of sizes."""

import time
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.metrics import lower_bound_packs
from omnibal_ext.packing.packers import first_fit
from omnibal_ext.packing.packers.balanced import pack_balanced
from omnibal_ext.packing.packers.first_fit import pack_first_fit
from omnibal_ext.packing.packs import PackList
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import assert_packed, assert_partition, drawn, first_fit_packs


@pytest.mark.parametrize("dimensions", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_as_many_packs_as_the_textbook(seed: int, dimensions: int) -> None:
    generator = np.random.default_rng(seed)
    budgets = generator.integers(50, 5000, dimensions)
    sizes = (generator.beta(1, 3, (200, dimensions)) * budgets).astype(np.int64)
    packs = pack_first_fit(sizes, budgets)
    assert_partition(packs, 200)
    assert (np.add.reduceat(sizes[packs.sample_ids], packs.pack_offsets[:-1]) <= budgets).all()
    assert len(packs) == first_fit_packs(sizes, budgets)


@pytest.mark.parametrize("seed", range(3))
def test_chunks_cost_no_more_than_a_pack_each(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every sample once, also where their number is no multiple of a chunk's."""
    sizes = np.random.default_rng(seed).integers(1, 400, (2_501, 2))
    whole = pack_first_fit(sizes, np.array([4_000, 5_000]), seed)
    monkeypatch.setattr(first_fit, "CHUNK", 500)
    parts = pack_first_fit(sizes, np.array([4_000, 5_000]), seed)
    assert_partition(parts, 2_501)
    assert len(parts) <= len(whole) + 2 * 6
    again = pack_first_fit(sizes, np.array([4_000, 5_000]), seed)
    assert np.array_equal(again.sample_ids, parts.sample_ids)


def packed_in_time(sizes: Sizes, vit_budget: int, llm_budget: int) -> PackList:
    pack_balanced(sizes.take(np.arange(100)), vit_budget, llm_budget, seed=0)  # compile
    begin = time.process_time()
    packs = pack_balanced(sizes, vit_budget, llm_budget, seed=0)
    assert time.process_time() - begin < 10
    assert_partition(packs, len(sizes))
    return packs


@pytest.mark.slow
def test_many_samples_at_native_resolution_fill_packs_as_few_do() -> None:
    """400,000 of which hardly two are alike: 1.0245 of the bound, if a sample opened a pack after so many looks."""
    generator = np.random.default_rng(0)
    patches = 4 * generator.lognormal(6.3, 0.7, 400_000).astype(int).clip(16, 10_000)
    tokens = patches // 4 + generator.lognormal(4.5, 0.8, 400_000).astype(int).clip(8, 1_500)
    sizes = Sizes.from_arrays(patches, tokens)
    assert len(packed_in_time(sizes, 65_536, 16_384)) <= 1.001 * lower_bound_packs(sizes, 65_536, 16_384)


@pytest.mark.slow
@pytest.mark.parametrize("budgets", [(12, 4096), (40, 2000), (32_768, 8192)])
@pytest.mark.parametrize("shape", ["independent", "alike", "opposite"])
def test_balanced_packs_are_never_more(budgets: tuple[int, int], shape: str) -> None:
    generator = np.random.default_rng(0)
    share = generator.beta(1.2, 4, 600)
    others = {"independent": generator.beta(1.2, 4, 600), "alike": share, "opposite": 0.6 * (1 - share)}[shape]
    sizes = Sizes.from_arrays((share * budgets[0]).astype(int), np.maximum(1, (others * budgets[1]).astype(int)))
    packs = pack_balanced(sizes, *budgets, seed=0)
    assert_packed(packs, sizes, *budgets)
    matrix = np.column_stack([sizes.tiles.astype(np.int64), sizes.tokens])
    assert len(packs) <= first_fit_packs(matrix, np.array(budgets))


def test_patches_are_packed_as_fast_as_tiles() -> None:
    """50,000 samples of which no two have as many patches; a table as high as the budget would take minutes."""
    generator = np.random.default_rng(0)
    patches = generator.permutation(32_768)[np.arange(50_000) % 32_768] // 8 + 1
    words = generator.lognormal(4.5, 1, 50_000).astype(int).clip(8, 2000)
    packed_in_time(Sizes.from_arrays(patches * 4, patches + words), 32_768, 16_384)


def test_further_sizes_have_budgets_of_their_own(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    audio, squares = generator.integers(0, 3000, 400), generator.integers(0, 2**40, 400)
    sizes = drawn(400, 6, (20, 900))
    sizes = Sizes(sizes.tiles, sizes.tokens, {"audio": audio, "squares": squares})
    budgets = {"audio": 2800, "squares": 0}
    options = PackOptions(vit_budget=12, llm_budget=2000, budgets=budgets, data_parallel_size=2)
    index, summary = build_index(sizes, tmp_path / "index", options)
    assert summary.rejected_by_reason == {"too many audio": int((audio > 2800).sum())}
    assert index.load_names == ("tiles", "tokens", "attention", "audio", "squares")
    for pack in range(index.num_packs):
        samples = index.samples(pack)
        assert index.loads[pack, 3:].tolist() == [audio[samples].sum(), squares[samples].sum()]
    assert index.loads[:, 3].max() <= 2800
    assert sorted(index.sample_ids) == np.flatnonzero(audio <= 2800).tolist()
