"""Samples that are as long as each other change places: packs that are full come nearer to each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.corpora import UNTUNED
from omnibal_ext.packing import even
from omnibal_ext.packing.balanced import pack_balanced
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.twins import Places, in_order_of_the_fullest, swap_twins


@given(
    st.integers(2, 30),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([0.0, 0.2]),
    st.integers(0, 999),
)
def test_swaps_keep_budgets_and_sums_and_only_bring_packs_nearer(
    samples: int, packs: int, kinds: int, parts: int, tolerance: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    sizes, costs = generator.integers(0, 9, (samples, kinds)), generator.random((samples, parts))
    owners = generator.integers(0, packs, samples)
    sums, loads, before = np.zeros((packs, parts)), np.zeros((packs, kinds), np.int64), owners.copy()
    np.add.at(sums, owners, costs)
    np.add.at(loads, owners, sizes)
    budgets, spread = loads.max(axis=0) + generator.integers(0, 3), sums.var(axis=0).sum()
    order = in_order_of_the_fullest(sizes, budgets, seed)
    kin = np.tile([0, packs], (packs, 1))
    places = Places(owners, loads, np.arange(packs), sums, kin)
    swap_twins(order, costs, sizes, budgets, places, tolerance, seed, 60_000)
    assert np.array_equal(np.bincount(owners, minlength=packs), np.bincount(before, minlength=packs))
    assert np.allclose(sums, [costs[owners == pack].sum(axis=0) for pack in range(packs)])
    assert np.array_equal(loads, [sizes[owners == pack].sum(axis=0) for pack in range(packs)])
    assert (loads <= budgets).all()
    assert sums.var(axis=0).sum() <= spread + 1e-12
    if tolerance == 0:  # nothing is left to do for two that stand near each other
        for place, one in enumerate(order):
            for two in order[place + 1 : place + 65]:
                here, there = owners[one], owners[two]
                more = sizes[two] - sizes[one]
                if (loads[here] + more <= budgets).all() and (loads[there] - more <= budgets).all():
                    apart = (sums[here] - sums[there]) / 2
                    moved = costs[two] - costs[one]
                    assert here == there or (apart**2).sum() <= ((apart + moved) ** 2).sum() + 1e-9


def test_samples_stand_in_the_order_of_the_size_that_packs_are_full_of() -> None:
    sizes = np.array([[5, 10], [1, 30], [3, 20], [2, 20]])
    assert sizes[in_order_of_the_fullest(sizes, np.array([6, 50]), 0), 0].tolist() == [1, 2, 3, 5]
    assert sizes[in_order_of_the_fullest(sizes, np.array([9, 40]), 0), 1].tolist() == [10, 20, 20, 30]
    text = sizes * [0, 1]  # a model without images has no tiles, nor room for any
    assert text[in_order_of_the_fullest(text, np.array([0, 40]), 0), 1].tolist() == [10, 20, 20, 30]


@pytest.mark.parametrize("seed", range(2))
def test_packs_full_of_tokens_come_nearer_than_by_meetings(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make, budgets = UNTUNED["heavy tails, wide"]
    sizes = make(12_000)
    columns = np.column_stack([sizes.tiles.astype(np.int64), sizes.tokens])
    seconds = PackCosts.of_model("internvl2.5-8b").of_samples(sizes, one_sum=True)
    found, spreads = pack_balanced(sizes, *budgets, seed=seed), []
    for looks in (0, even.MOST_LOOKS):
        monkeypatch.setattr(even, "MOST_LOOKS", looks)
        each, kin = np.arange(len(found)), np.zeros(len(found), np.int64)
        packs = even.even_packs(found, columns, np.array(budgets), seconds, each, kin, seed, effort=0.3)
        spreads.append(float(np.add.reduceat(seconds[packs.sample_ids], packs.pack_offsets[:-1]).std()))
    assert spreads[1] < 0.8 * spreads[0]
