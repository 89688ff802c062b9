"""The baselines do what their namesakes do: less padding, or balanced devices; ISF is the paper's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.corpora import heavy_tails
from omnibal_ext.packing.index.dispatch import assign_zigzag
from omnibal_ext.packing.ordering.metrics import pad_ratio
from omnibal_ext.packing.packers.baselines import pack_device_group, pack_length_group, pack_random
from omnibal_ext.packing.packers.isf import pack_isf
from omnibal_ext.packing.packs import PackList, pack_loads
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import assert_partition, corpora, published_files, samples_of


@given(corpora(), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_every_sample_is_packed_once(sizes: Sizes, samples: int, ranks: int, micro_batches: int) -> None:
    for packs in (
        pack_random(sizes, samples, seed=0),
        pack_length_group(sizes, samples, seed=0),
        pack_device_group(sizes, samples, ranks, micro_batches, seed=0),
    ):
        assert_partition(packs, len(sizes))
        assert (packs.counts[:-1] == samples).all()


def test_length_groups_pad_less_than_random_packs() -> None:
    sizes = heavy_tails(4000)
    grouped = pad_ratio(pack_length_group(sizes, 4, seed=0), sizes, pad=True)
    assert grouped < 0.3 * pad_ratio(pack_random(sizes, 4, seed=0), sizes, pad=True)


def test_device_groups_balance_the_samples_tokens_of_the_devices() -> None:
    """Devices' tokens before padding are balanced, although a device runs several packs."""

    def spread(packs: PackList) -> float:
        tokens = pack_loads(packs, sizes)[: 4000 // 64 * 16, 1]
        ranks = tokens[assign_zigzag(np.arange(len(tokens)).reshape(-1, 16), 8)].sum(axis=2)
        return float(np.mean(1 - ranks.mean(axis=1) / ranks.max(axis=1)))

    sizes = heavy_tails(4000)
    assert spread(pack_device_group(sizes, 4, 8, 2, seed=0)) < 0.2 * spread(pack_random(sizes, 4, seed=0))


def test_length_groups_are_windows_of_the_shuffle_longest_first() -> None:
    sizes = Sizes.from_arrays(np.zeros(450, dtype=int), np.random.default_rng(0).integers(1, 200, 450))
    packs, shuffled = pack_length_group(sizes, 4, seed=7), np.random.default_rng(7).permutation(450)
    for first in range(0, 450, 50 * 4):
        window = packs.sample_ids[first : first + 50 * 4]
        assert set(window.tolist()) == set(shuffled[first : first + 50 * 4].tolist())
        assert (np.diff(sizes.tokens[window]) <= 0).all()


# vit_budget, llm_budget: packs, mean tiles, mean tokens of the authors' script on their published lengths.
PUBLISHED = {
    (9, 4096): (34_559, 6.72, 1890), (10, 4096): (23_767, 9.77, 2749), (14, 4096): (18_087, 12.84, 3612),
    (15, 4352): (15_913, 14.59, 4105), (18, 5376): (12_963, 17.91, 5039), (20, 5888): (11_749, 19.76, 5560),
}  # fmt: skip


def loads(columns: list[list[int]], group: list[int]) -> list[int]:
    return [sum(column[sample] for sample in group) for column in columns]


def plain_isf(
    columns: list[list[int]], limits: list[int], enough: list[int], seed: int, passes: int
) -> list[list[int]]:
    """Section 3.2 of the paper, sample by sample, for any number of sizes; the shuffles are those of pack_isf."""
    generator, pool, kept = np.random.default_rng(seed), list(range(len(columns[0]))), []
    for turn in range(passes + 1):
        groups: list[list[int]] = []
        for sample in generator.permutation(np.array(pool, dtype=np.int64)).tolist() if pool else []:
            joined = [*groups[-1], sample] if groups else []
            if joined and all(load <= limit for load, limit in zip(loads(columns, joined), limits, strict=True)):
                groups[-1] = joined
            else:
                groups.append([sample])
        pool = []
        for group in groups:
            full = any(load >= least for load, least in zip(loads(columns, group), enough, strict=True))
            if full or turn == passes:
                kept.append(group)
            else:
                pool += group
    return kept


@given(corpora(), st.integers(0, 5), st.integers(0, 3), st.sampled_from([0, 40, 128]), st.booleans())
def test_it_is_sampling_and_filtering_as_the_paper_says(
    sizes: Sizes, seed: int, passes: int, slack: int, hears: bool
) -> None:
    """With mel frames, of which the paper has none, they are a third size: as much of their budget fills a pack."""
    frames = (sizes.tokens * 7919 % 900).tolist()
    sizes = Sizes.from_arrays(sizes.tiles, sizes.tokens, frames=frames) if hears else sizes
    packs = pack_isf(sizes, 12, 400, {"frames": 1000} if hears else {}, seed=seed, passes=passes, filter_tokens=slack)
    found = [samples.tolist() for samples in samples_of(packs)]
    columns = [sizes.tiles.tolist(), sizes.tokens.tolist(), *[frames] * hears]
    limits, enough = [12, 400, *[1000] * hears], [12, 400 - slack, *[1000 - slack * 1000 // 400] * hears]
    assert found == plain_isf(columns, limits, enough, seed, passes)


@pytest.mark.parametrize("budgets", PUBLISHED)
def test_published_lengths_give_the_published_results(budgets: tuple[int, int]) -> None:
    sizes = Sizes.load(published_files())
    packs = pack_isf(sizes, *budgets, seed=0)
    tiles, tokens, _ = pack_loads(packs, sizes).mean(axis=0)
    assert (len(packs), tiles, tokens) == pytest.approx(PUBLISHED[budgets], rel=0.05)
