"""The batch sampler: all ranks together see every sample once an epoch, and resume where they stopped."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.sampler import PackBatchSampler
from omnibal_ext.packing.options import LAST_ITERATION, PackOptions
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import REPOSITORY


@pytest.fixture
def index(tmp_path: Path) -> PackedIndex:
    generator = np.random.default_rng(0)
    sizes = Sizes.from_arrays(generator.integers(0, 5, 301), generator.integers(10, 90, 301))
    options = PackOptions(vit_budget=8, llm_budget=200, data_parallel_size=2, micro_batches=3, last_iteration="empty")
    return build_index(sizes, tmp_path / "index", options)[0]


def test_resume_at_another_data_parallel_size_runs_the_same_packs(index: PackedIndex) -> None:
    whole = [list(PackBatchSampler(index, 2, rank, micro_batches=3)) for rank in range(2)]
    first = PackBatchSampler(index, 2, 0, micro_batches=3)
    iterator = iter(first)
    for _ in range(6):
        next(iterator)
    seen = []
    for rank in range(3):
        resumed = PackBatchSampler(index, 3, rank, micro_batches=2)
        resumed.load_state_dict(first.state_dict())
        seen += list(resumed)
    assert sorted(map(tuple, seen)) == sorted(tuple(pack) for packs in whole for pack in packs[6:])


@pytest.mark.parametrize("last_iteration", LAST_ITERATION)
@pytest.mark.parametrize("stored_epochs", [1, 3])
def test_every_epoch_has_every_sample_once(tmp_path: Path, last_iteration: str, stored_epochs: int) -> None:
    generator = np.random.default_rng(0)
    sizes = Sizes.from_arrays(generator.integers(0, 5, 1000), generator.integers(10, 90, 1000))
    options = PackOptions(
        vit_budget=8, llm_budget=200, data_parallel_size=4, micro_batches=8, last_iteration=last_iteration,
        epochs=stored_epochs,
    )  # fmt: skip
    index = build_index(sizes, tmp_path / "index", options)[0]
    samplers = [PackBatchSampler(index, 4, rank, micro_batches=8) for rank in range(4)]
    for _ in range(5):
        expected = len(samplers[0])
        ranks = [list(sampler) for sampler in samplers]
        assert sorted(sample for packs in ranks for pack in packs for sample in pack) == list(range(1000))
        assert {len(packs) for packs in ranks} == {expected}
        for first in range(0, expected, 8):
            samples = [len(pack) for packs in ranks for pack in packs[first : first + 8]]
            assert min(samples) > 0 or sum(samples) < 32  # nobody has an empty pack while there are samples


def test_batches_sharded_by_another_library_are_the_ranks_packs(index: PackedIndex) -> None:
    """Accelerate: batch i goes to process i modulo the processes, and who shards asks for the batch size first."""
    batches = list(PackBatchSampler(index, 2, micro_batches=3))
    for rank in range(2):
        assert batches[rank::2] == list(PackBatchSampler(index, 2, rank, micro_batches=3))
    assert PackBatchSampler(index, 2, micro_batches=3).batch_size is None
    with pytest.raises(UserError, match="leave its rank out"):
        _ = PackBatchSampler(index, 2, 0, micro_batches=3).batch_size


def test_without_microbatches_they_are_the_index_s(index: PackedIndex) -> None:
    """A global batch of six packs: three of each of two ranks, two of each of three; four ranks do not divide it."""
    for ranks, rank in ((2, 1), (3, 0), (2, None)):
        told = PackBatchSampler(index, ranks, rank, micro_batches=6 // ranks)
        assert list(PackBatchSampler(index, ranks, rank)) == list(told)
    with pytest.raises(UserError, match="keep the product, or pack again"):
        PackBatchSampler(index, 4, 0)
    with pytest.raises(UserError, match="rank 2 is not one of 2"):
        PackBatchSampler(index, 2, 2)
    with pytest.raises(UserError, match="both must be 1 or more"):
        PackBatchSampler(index, 2, 0, micro_batches=0)


@pytest.mark.starts
def test_the_example_runs_and_learns() -> None:
    command = [sys.executable, str(REPOSITORY / "examples" / "bare_loop.py")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines if line.startswith("step")]
    assert losses[-1] < 0.5 * losses[0]
