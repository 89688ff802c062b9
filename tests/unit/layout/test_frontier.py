"""Recompute counts of a rank with one stage that no other count beats in every kind, for any number of encoders."""

from itertools import product

import numpy as np
import pytest

from omnibal_ext.layout.frontier import StageBytes, fits, minimal


def a_stage(random: np.random.Generator, kinds: int, room: float) -> StageBytes:
    """A stage of `kinds` kinds that can be recomputed, each with a column; the language model's is the last."""
    of_option = np.repeat(np.arange(kinds), 2)
    kept = random.uniform(1.0, 2.0, kinds)
    saved = np.stack([0.4 * kept, 0.9 * kept], axis=1).ravel() * random.uniform(0.7, 1.0, 2 * kinds)
    pairs = np.arange(2 * kinds).reshape(-1, 2)[::-1].copy()
    between, in_backward = np.array([[2, 0], [1, 1]]), np.array([[2, 0]])
    return StageBytes(
        np.ones(kinds), kept, kept, saved, saved, between, in_backward, of_option, np.arange(kinds)[::-1].copy(), pairs,
        room, False,
    )  # fmt: skip


@pytest.mark.parametrize("kinds", [2, 3, 4])
@pytest.mark.parametrize("seed", range(6))
def test_every_count_that_fits_has_one_among_the_found_that_takes_no_longer_in_any_kind(seed: int, kinds: int) -> None:
    random = np.random.default_rng(seed)
    held, offered = random.integers(1, 4 if kinds < 4 else 3, kinds), random.random(2 * kinds) < 0.8
    offered[1::2] = True
    seconds = np.stack([random.uniform(0.05, 0.4, kinds), random.uniform(0.5, 1.5, kinds)], axis=1).ravel()
    ways = [
        [(cheap, whole) for whole in range(n + 1) for cheap in range((n - whole) * ok + 1)]
        for n, ok in zip(held, offered[::2], strict=True)
    ]
    counts = [np.array(one).ravel() for one in product(*ways)]

    def taken(recomputed: np.ndarray) -> np.ndarray:
        return (recomputed * seconds).reshape(-1, 2).sum(axis=1)

    everything = a_stage(random, kinds, np.inf)
    for share in (0.05, 0.3, 0.7):
        most = sum(2 * held * everything.kept) + held.sum()
        stage = everything._replace(room=float(most * (1 - share)))
        found = minimal(stage, held, seconds, offered)
        assert all(fits(stage, held, recomputed) for recomputed in found)
        for recomputed in counts:
            if fits(stage, held, recomputed):
                assert any((taken(one) <= taken(recomputed) + 1e-9).all() for one in found), (share, recomputed)
