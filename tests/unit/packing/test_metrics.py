"""The measures against their formulas, by hand."""

import numpy as np
import pytest
from hypothesis import given

from omnibal_ext.packing.ordering.metrics import dist_ratios, lower_bound_packs, pad_ratio, rank_loads, wait
from omnibal_ext.packing.packs import PackList, pack_loads, sample_loads
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import corpora

SIZES = Sizes.from_arrays([1, 2, 3, 0], [10, 20, 40, 40])
PACKS = PackList(np.array([0, 3, 4]), np.array([2, 0, 1, 3]))


def test_balanced_ranks_have_ratio_zero_and_one_idle_rank_of_two_has_a_half() -> None:
    assert dist_ratios(np.array([[7, 7], [3, 3]])).tolist() == [0.0, 0.0]
    assert dist_ratios(np.array([[8, 0]])).tolist() == [0.5]
    assert dist_ratios(np.array([[8, 4], [5, 5], [0, 0]])).tolist() == [0.25, 0.0, 0.0]


def test_loads_are_what_runs() -> None:
    assert pack_loads(PACKS, SIZES).tolist() == [[6, 70, 1600 + 100 + 400], [0, 40, 1600]]
    assert pad_ratio(PACKS, SIZES, pad=True) == pytest.approx(((30 + 20) / (40 * 3) + 0) / 2)
    assert pad_ratio(PACKS, SIZES, pad=False) == 0.0
    bounds = [
        lower_bound_packs(SIZES, dict(zip(("tiles", "tokens"), budgets, strict=True)))
        for budgets in ((2, 1000), (100, 50), (0, 110))
    ]
    assert bounds == [3, 3, 1], "of the scarcer of tiles and tokens"
    ranks = rank_loads(np.array([[[0, 1], [1, -1]]]), np.array([5, 7]))  # empty packs are free
    assert ranks.tolist() == [[12, 7]]
    assert pack_loads(PACKS, SIZES, pad=True).tolist() == [[6, 120, 4800], [0, 40, 1600]]


def test_reordering_moves_whole_packs() -> None:
    swapped = PACKS.reordered(np.array([1, 0]))
    assert swapped.sample_ids.tolist() == [3, 2, 0, 1]
    assert swapped.pack_offsets.tolist() == [0, 1, 4]


def test_each_part_waits_for_its_own_fullest_rank_and_dear_iterations_count_more() -> None:
    """Two iterations, two ranks, vision and language: by hand, not of one iteration and not of the parts' sums."""
    seconds = np.array([[[3.0, 1.0], [1.0, 2.0]], [[10.0, 0.0], [10.0, 30.0]]])
    busy = (3.0 + 2.0) + (10.0 + 30.0)
    worked = ((3.0 + 1.0) + (1.0 + 2.0) + (10.0 + 10.0) + (0.0 + 30.0)) / 2
    assert wait(seconds) == pytest.approx(1 - worked / busy)
    assert wait(seconds[:, :, :1] + seconds[:, :, 1:]) == pytest.approx(1 - worked / (4.0 + 40.0))
    assert wait(np.full((3, 2, 2), 7.0)) == pytest.approx(0.0)
    assert wait(np.zeros((3, 2, 2))) == 0.0


@given(corpora())
def test_a_sample_s_loads_are_those_of_a_pack_of_its_own(sizes: Sizes) -> None:
    more = Sizes.from_arrays(sizes.tiles, sizes.tokens, patches=sizes.tokens * 3)
    alone = np.arange(len(more) + 1)
    found = sample_loads(more)
    assert found.dtype == np.int64
    assert np.array_equal(found, pack_loads(PackList(alone, alone[:-1]), more))
