"""Packs run beside dearer ones: they wait for no more than may be spent, and for what brings most."""

import numpy as np
import pytest
from numpy.typing import NDArray

from omnibal_ext.packing.lift import lift

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def a_corpus(seed: int, packs: int = 8_000) -> tuple[Floats, Floats]:
    """Packs of eight costs [P, 1], and features [P, 2] that go with cost, the first one more than the second."""
    generator = np.random.default_rng(seed)
    seconds = 1.0 + 0.01 * generator.integers(0, 8, packs)
    beyond = (seconds - seconds.mean()) / seconds.std()
    features = np.stack(
        [beyond + 0.3 * generator.normal(size=packs), 0.5 * beyond + generator.normal(size=packs)], axis=1
    )
    return seconds[:, None], features - features.mean(axis=0)


def squares(lifted: Floats, features: Floats) -> float:
    """Levels' mean features, squared, each times its packs."""
    _, level = np.unique(lifted[:, 0], return_inverse=True)
    counts = np.bincount(level)
    return float(sum((np.bincount(level, feature) ** 2 / counts).sum() for feature in features.T))


@pytest.mark.parametrize("seed", range(3))
def test_no_second_of_waiting_brings_more_elsewhere(seed: int) -> None:
    """What the best move that is left brings a second is no more than what the worst one made brought, or hardly."""
    seconds, features = a_corpus(seed)
    spent = 0.004
    lifted = lift(seconds, features, np.arange(len(seconds)), 1e-6, spent, seed)
    assert (lifted >= seconds).all()
    assert set(np.unique(lifted)) <= set(np.unique(seconds))
    assert 0.9 * spent <= (lifted - seconds).sum() / seconds.sum() <= 1.02 * spent
    now = squares(lifted, features)
    assert now < 0.5 * squares(seconds, features)
    best_left, worst_made = 0.0, np.inf
    for pack in range(0, len(seconds), 20):
        for level in np.unique(seconds):
            longer = level - lifted[pack, 0]
            if level < seconds[pack, 0] or abs(longer) < 1e-9:
                continue
            moved = lifted.copy()
            moved[pack] = level
            brings = (now - squares(moved, features)) / longer
            best_left, worst_made = (
                (max(best_left, brings), worst_made) if longer > 0 else (best_left, min(worst_made, brings))
            )
    assert best_left <= 1.15 * worst_made


@pytest.mark.parametrize("seed", range(3))
def test_a_pack_waits_in_no_part_for_less_than_it_takes(seed: int) -> None:
    """Vision and language: a level is as dear as each of its packs in both; those left out of `packs` stay."""
    generator = np.random.default_rng(seed)
    seconds = generator.integers(1, 5, (1_000, 2)).astype(np.float64)
    features = seconds - seconds.mean(axis=0)
    some = np.flatnonzero(generator.random(1_000) < 0.8)
    lifted = lift(seconds, features, some, 1e-6, 0.02, seed)
    moved = np.flatnonzero((lifted != seconds).any(axis=1))
    assert 0 < len(moved) < 500
    assert np.isin(moved, some).all()
    assert (lifted >= seconds).all()
    assert {tuple(row) for row in lifted[moved].tolist()} <= {tuple(row) for row in seconds[some].tolist()}
    assert (lifted - seconds)[some].sum() <= 1.02 * 0.02 * seconds[some].sum()


def test_nothing_is_lifted_for_nothing() -> None:
    seconds, features = a_corpus(0, 200)
    every = np.arange(200)
    assert lift(seconds, features, every, 1e-6, 0.0, 0) is seconds
    assert lift(seconds, features[:, :0], every, 1e-6, 0.01, 0) is seconds
    assert lift(seconds, features, every, 1e-6, 0.01, 0, effort=1e-6) is seconds
    alike = np.zeros_like(features)
    assert np.array_equal(lift(seconds, alike, every, 1e-6, 0.01, 0), seconds)
