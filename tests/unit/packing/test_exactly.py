"""From a corpus to the last step: every sample exactly as often as its weight says, in every epoch, over any resume.

CASES=20000 pytest tests/unit/packing/test_exactly.py generates as many.
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
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes

CASES = int(os.environ.get("CASES", "150"))
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


@pytest.mark.parametrize("seed", range(3))
def test_every_sample_is_seen_exactly_as_often_as_its_weight_says(tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng((seed, 7))
    for case in range(CASES // 3):
        try:
            run_a_case(tmp_path / "index", generator)
        except AssertionError as error:
            error.add_note(f"case {case} of seed {seed}")
            raise
