"""Level groups: every iteration is level across ranks and microbatches, and none is placed by its size or source."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.corpora import UNTUNED
from omnibal_ext.packing import pack_loads
from omnibal_ext.packing.balanced import pack_balanced
from omnibal_ext.packing.dispatch import deal
from omnibal_ext.packing.level import level_groups
from omnibal_ext.packing.metrics import dist_ratio, rank_loads
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import published_files

BUDGETS = [(9, 4096), (10, 4096), (14, 4096), (15, 4352), (18, 5376), (20, 5888)]


def ratios(sizes: Sizes, budgets: tuple[int, int], ranks: int, micro_batches: int) -> list[float]:
    """DistRatios of tiles, tokens and attention of an epoch of balanced packs."""
    packs = pack_balanced(sizes, *budgets, seed=0)
    loads = pack_loads(packs, sizes)
    order = level_groups(loads, ranks, micro_batches, seed=0)
    whole = len(order) // (ranks * micro_batches) * (ranks * micro_batches)
    iterations = deal(order[:whole].reshape(-1, ranks * micro_batches), ranks)
    return [dist_ratio(rank_loads(iterations, loads[:, load])) for load in range(3)]


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 6), st.integers(1, 4), st.integers(0, 9))
def test_every_pack_is_dispatched_once(packs: int, ranks: int, micro: int, seed: int) -> None:
    loads = np.random.default_rng(seed).integers(0, 50, (packs, 3))
    assert np.array_equal(np.sort(level_groups(loads, ranks, micro, seed)), np.arange(packs))


@pytest.mark.parametrize("budgets", BUDGETS)
def test_published_lengths_are_level_to_a_thousandth(budgets: tuple[int, int]) -> None:
    tiles, tokens, attention = ratios(Sizes.load(published_files()), budgets, 8, 1)
    assert max(tiles, tokens) <= 0.001
    assert attention <= 0.005


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("name", UNTUNED)
def test_corpora_that_nothing_was_tuned_on_are_level(name: str, micro_batches: int) -> None:
    make, budgets = UNTUNED[name]
    assert max(ratios(make(60_000), budgets, 8, micro_batches)) <= 0.005


def test_groups_of_equal_packs_are_found() -> None:
    kinds = np.array([[4, 100, 2000], [9, 40, 500], [1, 90, 8100]])
    loads = kinds[np.random.default_rng(0).integers(0, 3, 3000)]
    loads = np.concatenate([kinds[[0]]] * (-np.sum(loads[:, 0] == 4) % 8) + [loads])
    order = level_groups(loads, 8, 1, seed=0)
    groups = loads[order[: len(order) // 8 * 8]].reshape(-1, 8, 3)
    mixed = (groups != groups[:, :1]).any(axis=(1, 2)).sum()
    assert mixed <= 2  # at most one border between each two kinds


def test_the_emptiest_packs_come_last() -> None:
    loads = np.random.default_rng(0).integers(80, 100, (35, 3))
    loads[[4, 20, 31]] = 1
    assert set(level_groups(loads, 8, 1, seed=0)[-3:]) == {4, 20, 31}


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, with ties broken by position."""
    return float(np.corrcoef(np.argsort(np.argsort(a, kind="stable")), np.argsort(np.argsort(b, kind="stable")))[0, 1])


def test_position_tells_nothing_of_size_or_source() -> None:
    files = published_files()
    source = np.repeat(np.arange(3), [len(Sizes.load(path)) for path in files])
    sizes = Sizes.load(files)
    packs = pack_balanced(sizes, 18, 5376, seed=0)
    loads = pack_loads(packs, sizes)
    samples = packs.reordered(level_groups(loads, 8, 1, seed=0)).sample_ids
    position = np.arange(len(samples))
    generator = np.random.default_rng(0)  # ties in random order
    for values in (sizes.tokens[samples], sizes.tiles[samples], source[samples]):
        assert abs(rank_correlation(position, values + generator.random(len(values)) / 2)) < 0.02
    tenth = len(samples) // 10  # no stretch of the epoch belongs to one source
    shares = [np.bincount(source[samples[i * tenth : (i + 1) * tenth]], minlength=3) / tenth for i in range(10)]
    assert np.allclose(shares, np.bincount(source) / len(source), atol=0.1)
