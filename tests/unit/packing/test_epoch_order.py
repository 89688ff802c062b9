"""Epochs are epochs: each pack once in each, every sample exactly as often as its weight says, over any resume.

CASES=20000 pytest tests/unit/packing/test_epoch_order.py -k exactly generates as many.
"""

import os
import shutil
from collections import Counter
from fractions import Fraction
from math import ceil, floor
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.epoch_order import EpochOrder
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packs import EMPTY_PACK
from omnibal_ext.sizes import Sizes
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


@pytest.mark.parametrize("seed", short(range(10), [0]))
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


WEIGHED = int(os.environ.get("WEIGHED", "150"))
WEIGHTS = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(1), Fraction(3, 2), Fraction(2), Fraction(5))


def run_a_case(folder: Path, generator: np.random.Generator) -> None:
    counts = [int(count) for count in generator.integers(1, 12, generator.integers(1, 4))]
    weights = [WEIGHTS[number] for number in generator.integers(0, len(WEIGHTS), len(counts))]
    if max(weight * count for weight, count in zip(weights, counts, strict=True)) < 1:
        return  # an epoch without a sample is refused
    samples = sum(counts)
    sizes = Sizes.from_arrays(generator.integers(0, 6, samples), generator.integers(1, 60, samples))
    sources = tuple(CorpusSource(str(n), c, float(w)) for n, (c, w) in enumerate(zip(counts, weights, strict=True)))
    ranks, micro_batches = int(generator.integers(1, 4)), int(generator.integers(1, 4))
    options = PackOptions(
        vit_budget=8, llm_budget=80, data_parallel_size=ranks, micro_batches=micro_batches, seconds=0.001,
        seed=int(generator.integers(100)), last_iteration=str(generator.choice(["next_epoch", "empty"])),
    )  # fmt: skip
    shutil.rmtree(folder, ignore_errors=True)
    index, _ = build_index(Corpus(sizes, sources), folder, options)
    epoch_packs = index.manifest["epoch_packs"]
    iterations = PackStream(index, ranks, micro_batches).first_iteration(2 * len(epoch_packs))
    steps: list[list[int]] = []
    while len(steps) < iterations:  # a run that is stopped now and then, and goes on with other ranks
        batch = ranks * micro_batches
        now = int(generator.choice([size for size in range(1, batch + 1) if batch % size == 0]))
        end = min(iterations, len(steps) + int(generator.integers(1, 6)))
        steps += [step.ravel().tolist() for step in PackStream(index, now, batch // now).iterations(len(steps), end)]
    seen = [Counter[int]() for _ in range(2 * len(epoch_packs))]
    runs: Counter[int] = Counter()
    for pack in (pack for step in steps for pack in step if pack >= 0):
        section = int(np.searchsorted(np.cumsum(epoch_packs), pack, side="right"))
        epoch = runs[pack] * len(epoch_packs) + section
        runs[pack] += 1
        if epoch < len(seen):  # the last step may have begun the next epoch
            seen[epoch].update(index.samples(pack).tolist())
    for own in seen:
        for source, weight, first in zip(sources, weights, np.cumsum([0, *counts]), strict=False):
            times = [own[sample] for sample in range(first, first + source.samples)]
            assert set(times) <= {floor(weight), ceil(weight)}
            assert sum(times) in (floor(weight * source.samples), ceil(weight * source.samples))
    for sample, weight in enumerate(np.repeat(weights, counts)):
        assert sum(own[sample] for own in seen) == len(seen) * weight


@pytest.mark.parametrize("seed", short(range(3), [0]))
def test_every_sample_is_seen_exactly_as_often_as_its_weight_says(tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng((seed, 7))
    for case in range(WEIGHED // 3):
        try:
            run_a_case(tmp_path / "index", generator)
        except AssertionError as error:
            error.add_note(f"case {case} of seed {seed}")
            raise
