"""Samples assigned to ranks as they come: near the best there is, packed or padded, by brute force and by bounds."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.rebalance import corpus
from omnibal_ext.rebalance.phases import Phase, assign_packed

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=7)


def fullest(seconds: np.ndarray, place: np.ndarray, ranks: int) -> float:
    return max(seconds[place == rank].sum() for rank in range(ranks))


def fullest_padded(seconds: np.ndarray, place: np.ndarray, ranks: int) -> float:
    batches = [seconds[place == rank] for rank in range(ranks)]
    return max(len(batch) * batch.max() for batch in batches if len(batch))


@given(LENGTHS, st.integers(1, 4))
def test_packed_batches_keep_graham_s_bound(lengths: list[int], ranks: int) -> None:
    seconds = np.array(lengths, np.float64)
    place = assign_packed(seconds, ranks)
    assert len(place) == len(seconds)
    assert set(place.tolist()) <= set(range(ranks))
    best = min(fullest(seconds, np.array(way), ranks) for way in product(range(ranks), repeat=len(seconds)))
    assert fullest(seconds, place, ranks) <= (4 / 3 - 1 / (3 * ranks)) * best * (1 + 1e-9)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=10))
def test_few_samples_of_two_ranks_are_divided_as_well_as_can_be(lengths: list[int]) -> None:
    seconds = np.array(lengths, np.float64)
    best = min(fullest(seconds, np.array(way), 2) for way in product(range(2), repeat=len(seconds)))
    assert best <= fullest(seconds, assign_packed(seconds, 2), 2) <= best + 1e-4 * seconds.sum() / 2


@pytest.mark.parametrize(("each", "most"), [(4, 1.025), (8, 1.01)])
def test_samples_of_few_kinds_are_level_on_average(each: int, most: float) -> None:
    """One, three or five tiles and a question. Swaps of one for one leave 4.1 percent at four samples a rank; without
    any it is 2.3 at eight, with them .5."""
    over = []
    for seed in range(40):
        random = np.random.default_rng(seed)
        tiles = random.choice([1, 3, 5], 8 * each, p=[0.1, 0.4, 0.5])
        seconds = 256.0 * tiles + random.integers(40, 130, 8 * each)
        loads = np.bincount(assign_packed(seconds, 8), seconds, 8)
        over.append(loads.max() / max(loads.mean(), seconds.max()))
    assert np.mean(over) <= most


@given(LENGTHS, st.integers(1, 4), st.floats(0.0, 0.5))
def test_padded_batches_are_the_best_there_are(lengths: list[int], ranks: int, quadratic: float) -> None:
    phase = Phase(1.0, quadratic, padded=True)
    units = np.array(lengths)
    place, seconds = phase.assign(units, ranks), phase.seconds(units)
    best = min(fullest_padded(seconds, np.array(way), ranks) for way in product(range(ranks), repeat=len(units)))
    assert fullest_padded(seconds, place, ranks) == pytest.approx(best)
    assert phase.of_batches(units, place, ranks).max() == pytest.approx(best)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("ranks", "each", "most"), [(8, 4, 1.06), (32, 4, 1.06), (256, 4, 1.06), (8, 16, 1.02), (256, 16, 1.02)]
)
def test_the_fullest_rank_has_little_more_than_it_must(ranks: int, each: int, most: float, seed: int) -> None:
    """Over the larger of the mean and the longest sample."""
    units = np.random.default_rng(seed).lognormal(6, 0.8, ranks * each).astype(int) + 8
    phase = Phase(2e-6, 1e-10)
    seconds = phase.of_batches(units, phase.assign(units, ranks), ranks)
    assert seconds.sum() == pytest.approx(phase.seconds(units).sum())
    assert seconds.max() <= most * max(seconds.mean(), phase.seconds(units).max())


@pytest.mark.parametrize("ranks", [8, 32])
def test_four_samples_a_rank_are_level_within_a_percent_and_a_half_on_average(ranks: int) -> None:
    """Of instruction data; assignment longest first alone leaves 4 to 5 percent, dividing anew .2 to .4."""
    phase, over = Phase(1.0, 1 / 36_864), []
    for seed in range(20):
        _, units = corpus(4 * ranks, seed)
        seconds = phase.of_batches(units, phase.assign(units, ranks), ranks)
        over.append(seconds.max() / max(seconds.mean(), phase.seconds(units).max()))
    assert np.mean(over) <= 1.015


def test_a_sample_s_seconds_are_linear_and_quadratic_in_its_units() -> None:
    assert Phase(2.0, 3.0).seconds(np.array([0, 1, 5])).tolist() == [0.0, 5.0, 85.0]
    phase, units, place = Phase(1.0, 1.0), np.array([1, 2, 3]), np.array([1, 1, 2])
    assert phase.of_batches(units, place, 4).tolist() == [0.0, 2.0 + 6.0, 12.0, 0.0]
    assert phase._replace(padded=True).of_batches(units, place, 4).tolist() == [0.0, 2 * 6.0, 12.0, 0.0]


@pytest.mark.parametrize("padded", [False, True])
def test_no_samples_can_be_assigned(padded: bool) -> None:
    assert Phase(1.0, padded=padded).assign(np.zeros(0, np.int64), 4).tolist() == []
