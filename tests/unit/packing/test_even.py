"""Packs that cost the same: as many as before, of the same samples, within the same budgets."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.corpora import UNTUNED
from omnibal_ext.packing.balanced import pack_balanced
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.epoch import even
from omnibal_ext.packing.even import even_packs
from omnibal_ext.packing.first_fit import pack_first_fit
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packs import LOADS, Packs, pack_loads
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import assert_partition

Floats = NDArray[np.float64]


def sums_of(packs: Packs, values: NDArray[np.generic]) -> NDArray[np.generic]:
    return np.stack([values[own].sum(axis=0) for own in np.split(packs.sample_ids, packs.pack_offsets[1:-1])])


@given(st.integers(1, 60), st.integers(1, 3), st.integers(1, 2), st.integers(0, 999))
def test_evening_keeps_samples_budgets_and_the_number_of_packs(samples: int, kinds: int, parts: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    sizes, budgets = generator.integers(0, 20, (samples, kinds)), np.full(kinds, 40)
    seconds = generator.random((samples, parts))
    before = pack_first_fit(sizes, budgets)
    after = even_packs(before, sizes, budgets, seconds, 1, seed)
    assert_partition(after, samples)
    assert len(after) == len(before)
    assert (after.counts > 0).all()
    assert (sums_of(after, sizes) <= budgets).all()
    assert sums_of(after, seconds).var(axis=0).sum() <= sums_of(before, seconds).var(axis=0).sum() + 1e-12
    again = even_packs(before, sizes, budgets, seconds, 1, seed)
    assert np.array_equal(again.sample_ids, after.sample_ids)
    assert np.array_equal(again.pack_offsets, after.pack_offsets)


@pytest.mark.parametrize("seed", range(20))
def test_two_packs_are_split_in_the_best_of_all_ways(seed: int) -> None:
    """Every way to share out up to four and four samples, tried one by one."""
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 5, 2)
    samples = int(counts.sum())
    packs = Packs(np.array([0, counts[0], samples]), generator.permutation(samples))
    sizes, seconds = generator.integers(0, 9, (samples, 2)), generator.random((samples, 2))
    budgets = np.maximum(sums_of(packs, sizes).max(axis=0), generator.integers(15, 25, 2))
    distances = []
    for way in product((False, True), repeat=samples):
        sides = [np.array(way), ~np.array(way)]
        if all(side.any() and (sizes[side].sum(axis=0) <= budgets).all() for side in sides):
            distances.append(((seconds[sides[0]].sum(axis=0) - seconds[sides[1]].sum(axis=0)) ** 2).sum())
    one, other = sums_of(even_packs(packs, sizes, budgets, seconds, 1, seed), seconds)
    assert ((one - other) ** 2).sum() == pytest.approx(min(distances), abs=1e-6)


def test_one_large_sample_goes_for_many_small_ones() -> None:
    """Two long texts in one pack and sixteen images in the other, both full: a text goes for eight images."""
    sizes = np.array([[0, 4096]] * 2 + [[1, 512]] * 16)
    packs = Packs(np.array([0, 2, 18]), np.arange(18))
    after = even_packs(packs, sizes, np.array([16, 8192]), sizes / [16, 8192], 1, 0)
    assert sums_of(after, sizes).tolist() == [[8, 8192]] * 2


@pytest.mark.parametrize("seed", range(3))
def test_packs_of_one_rank_make_up_for_each_other_unless_they_are_far_apart(seed: int) -> None:
    """Of a corpus with long texts: packs without tiles are gone, but most of those that are near the mean are left."""
    make, budgets = UNTUNED["heavy tails, wide"]
    sizes = make(4_000)
    found = pack_balanced(sizes, *budgets, seed=seed)
    before = {frozenset(own) for own in np.split(found.sample_ids, found.pack_offsets[1:-1])}
    left, deviations = [], []
    for micro_batches in (1, 4):
        options = PackOptions(
            vit_budget=budgets[0], llm_budget=budgets[1], data_parallel_size=8, micro_batches=micro_batches
        )
        after = even(found, sizes, options, PackCosts.of_model(), seed)
        left.append(sum(frozenset(own) in before for own in np.split(after.sample_ids, after.pack_offsets[1:-1])))
        deviations.append(spread(sizes, after, one_sum=False)[0])
    assert left[1] > 3 * left[0]
    assert max(deviations) < 0.5 * spread(sizes, found, one_sum=False)[0]
    assert pack_loads(found, sizes)[:, 0].min() == 0
    assert pack_loads(after, sizes)[:, 0].min() >= 12


def spread(sizes: Sizes, packs: Packs, one_sum: bool) -> Floats:
    """Deviation of the packs' seconds in each part, over the seconds of a mean pack."""
    seconds = PackCosts.of_model().waited_for(pack_loads(packs, sizes), LOADS, one_sum)
    return seconds.std(axis=0) / seconds.sum(axis=1).mean()


@pytest.mark.parametrize("name", ["correlated", "many images", "independent"])
def test_packs_of_a_corpus_cost_the_same(name: str) -> None:
    """Where budgets leave a choice packs differ by less than a percent."""
    make, budgets = UNTUNED[name]
    sizes = make(5_000)
    packs = pack_balanced(sizes, *budgets, seed=0, fine=False)
    columns = np.column_stack([sizes.tiles.astype(np.int64), sizes.tokens])
    for one_sum in (True, False):
        seconds = PackCosts.of_model().of_samples(sizes, one_sum)
        after = even_packs(packs, columns, np.array(budgets), seconds, 1, 0)
        assert (spread(sizes, after, one_sum) < 0.01).all()
        assert spread(sizes, after, one_sum).max() < 0.5 * spread(sizes, packs, one_sum).max()


def test_what_samples_add_is_what_packs_cost() -> None:
    sizes = Sizes.from_arrays([3, 0, 5, 1], [900, 40, 2000, 300])
    packs = Packs(np.array([0, 3, 4]), np.array([2, 0, 1, 3]))
    costs = PackCosts({"vision": {"pack": 0.5, "tiles": 0.2}, "language": {"tokens": 0.01, "attention": 1e-6}})
    for one_sum in (True, False):
        once = np.array([0.5]) if one_sum else np.array([0.5, 0.0])
        expected = costs.waited_for(pack_loads(packs, sizes), LOADS, one_sum) - once
        assert np.allclose(sums_of(packs, costs.of_samples(sizes, one_sum)), expected)


def test_an_index_is_of_even_packs_and_no_time_leaves_them_as_they_are_found(tmp_path: pytest.TempPathFactory) -> None:
    make, budgets = UNTUNED["independent"]
    sizes, spreads = make(2_000), []
    for seconds in (0.0, 1.0):
        options = PackOptions(
            vit_budget=budgets[0], llm_budget=budgets[1], data_parallel_size=4, micro_batches=4, seconds=seconds
        )
        index, summary = build_index(sizes, f"{tmp_path}/{seconds}", options)
        assert (np.asarray(index.loads)[:, :2] <= budgets).all()
        spreads.append((len(index.loads), index.seconds(np.arange(summary.packs)).sum(axis=1).std()))
    assert spreads[0][0] == spreads[1][0]
    assert spreads[1][1] < 0.2 * spreads[0][1]
