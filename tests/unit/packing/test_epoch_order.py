"""Epochs are epochs: each pack once in each, none twice in a step, whatever is stored and wherever a run resumes."""

from collections import Counter

import numpy as np
import pytest

from omnibal_ext.packing.index.epoch_order import EpochOrder
from omnibal_ext.packing.packs import EMPTY_PACK
from tests.long import short

CASES = 2000


def generated(generator: np.random.Generator) -> tuple[list[int], int, bool, EpochOrder]:
    """Stored epochs of any length, any global batch, either kind of last iteration, parts or none."""
    batch = int(generator.integers(1, 9))
    sections = generator.integers(1, 40, generator.integers(1, 4)).tolist()
    whole, seed = bool(generator.integers(2)), int(generator.integers(100))
    parts = []
    for packs in sections:
        cut = int(generator.integers(0, packs // batch + 1))
        parts.append([cut, packs // batch - cut])
    return sections, batch, whole, EpochOrder(sections, batch, seed, whole, parts if generator.integers(2) else ())


@pytest.mark.parametrize("seed", short(range(10), range(3)))
def test_every_pack_runs_once_an_epoch_over_any_resume(seed: int) -> None:
    generator = np.random.default_rng(seed)
    for _ in range(CASES):
        sections, batch, whole, order = generated(generator)
        epochs = len(sections) + 3
        end = -(-order.start_of(epochs) // batch) * batch
        ran = order.packs(0, end)
        first_pack = np.cumsum([0, *sections])
        for epoch in range(epochs):
            own = ran[order.start_of(epoch) : order.start_of(epoch + 1)]
            section = epoch % len(sections)
            assert np.array_equal(np.sort(own[own != EMPTY_PACK]), np.arange(*first_pack[section : section + 2]))
            assert np.count_nonzero(own == EMPTY_PACK) == (-sections[section] % batch if whole else 0)
        if min(sections) >= batch:
            for step in ran.reshape(-1, batch):
                packs = Counter(step.tolist())
                packs.pop(EMPTY_PACK, None)
                assert max(packs.values()) == 1
        position = int(generator.integers(end))
        assert np.array_equal(order.packs(position, end), ran[position:])


def test_iterations_of_so_many_epochs() -> None:
    """Three epochs of 20 packs in steps of 8: 60 packs take 8 steps, not three times 3."""
    order = EpochOrder([20], 8, 0, complete_iterations=False)
    assert [order.first_iteration(epochs) for epochs in (0, 0.5, 1, 2, 3)] == [0, 2, 3, 5, 8]
    order = EpochOrder([20, 21], 8, 0, complete_iterations=True)
    assert [order.first_iteration(epochs) for epochs in (1, 2, 3)] == [3, 6, 9]


def test_groups_are_shuffled_within_their_sub_epoch() -> None:
    order = EpochOrder([64], 4, 0, True, [[8, 8]])
    first, again = order.packs(0, 64), order.packs(64, 128)
    assert not np.array_equal(first, again)
    assert set(again[:32]) == set(first[:32])
    assert (np.diff(again.reshape(-1, 4), axis=1) == 1).all()


def test_what_is_left_of_an_epoch_is_cut_between_sub_epochs() -> None:
    """Parts of two and three groups, from the second group on: one of the first part is left, and all of the second."""
    order = EpochOrder([20], 4, 0, True, [[2, 3]])
    left = [part.tolist() for part in order.remaining_groups(1)]
    assert left == [[[4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]]
