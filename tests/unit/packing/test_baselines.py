"""The baselines do what their namesakes do: less padding, or balanced devices."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.corpora import heavy_tails
from omnibal_ext.packing.index.dispatch import assign_zigzag
from omnibal_ext.packing.ordering.metrics import pad_ratio
from omnibal_ext.packing.packers.baselines import pack_device_group, pack_length_group, pack_random
from omnibal_ext.packing.packs import PackList, pack_loads
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import assert_partition, corpora


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
