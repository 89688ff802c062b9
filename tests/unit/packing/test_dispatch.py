"""The stream of packs: every pack once an epoch, a position is all it takes to resume, the same at any DP size; and the
batch sampler that follows it.
"""

import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.index.dispatch import EMPTY_PACK, PackStream, assign_zigzag, epoch_iterations
from omnibal_ext.packing.index.packed_index import PackedIndex, write_index
from omnibal_ext.packing.index.sampler import PackBatchSampler
from omnibal_ext.packing.options import LAST_ITERATION, PackOptions
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.packing.packs import LoadedPacks, PackList, offsets_of
from tests.unit.packing.corpora import REPOSITORY, drawn, made_up_manifest


def index_of(
    folder: Path, epoch_packs: list[int], global_batch: int, last_iteration: str = "next_epoch"
) -> PackedIndex:
    count = sum(epoch_packs)
    packs = PackList(offsets_of(np.ones(count, np.int64)), np.arange(count))
    manifest = made_up_manifest(global_batch=global_batch, last_iteration=last_iteration, epoch_packs=epoch_packs)
    made = LoadedPacks(packs, np.ones((count, 3), np.int64))
    return write_index(folder, [made], lambda: (manifest, None), [], over=True)


@pytest.mark.parametrize(("ranks", "limit"), [(2, 0.2), (4, 0.2), (8, 1.0)])
def test_ranks_are_balanced_at_any_data_parallel_size_and_at_an_epochs_end(
    tmp_path: Path, ranks: int, limit: float
) -> None:
    """Against packs assigned at random, unequal as built; rare light ones come by fours, which balance no eight."""
    options = PackOptions(vit_budget=24, llm_budget=2500, data_parallel_size=4, micro_batches=4, seconds=0)
    index, _ = build_index(drawn(3000, 9, (20, 900)), tmp_path / "index", options)
    stream = PackStream(index, ranks, 16 // ranks)
    iterations = stream.iterations(0, stream.first_iteration(3))
    seconds = index.seconds(np.arange(index.num_packs))
    at_random = np.random.default_rng(0).permuted(iterations.reshape(-1, 16), axis=1).reshape(iterations.shape)
    assert wait(rank_loads(iterations, seconds)) < limit * wait(rank_loads(at_random, seconds))


def test_epoch_iterations_count_the_incomplete_one(tmp_path: Path) -> None:
    index = index_of(tmp_path / "dump", [21], 8)
    with pytest.raises(UserError, match=r"global batch of 8 packs.*are 6"):
        PackStream(index, 3, 2)
    stream = PackStream(index, 2, 4)
    assert [stream.beyond(epochs) for epochs in (1, 2, 8)] == [3, 6, 0]  # packs of the next epoch in the last iteration
    iterations = epoch_iterations(stream)
    assert iterations.shape == (3, 2, 4)
    assert set(iterations.ravel()) == set(range(21))


def test_zigzag_assignment_keeps_sums_equal() -> None:
    assert assign_zigzag(np.arange(6)[None], 2).tolist() == [[[0, 3, 4], [1, 2, 5]]]
    assert assign_zigzag(np.arange(16)[None], 4).sum(axis=2).tolist() == [[30, 30, 30, 30]]


def test_empty_packs_take_no_time_when_an_epoch_s_end_is_assigned(tmp_path: Path) -> None:
    """Three packs and three empty ones on two ranks: the long one alone, whatever the first pack of the index takes."""
    tokens = np.array([10_000] + [100] * 5 + [80, 40, 40])
    loads = np.stack([np.zeros(9, np.int64), tokens, tokens**2], axis=1)
    manifest = made_up_manifest(global_batch=6, last_iteration="empty", epoch_packs=[9])
    packs = PackList(offsets_of(np.ones(9, np.int64)), np.arange(9))
    index = write_index(tmp_path / "index", [LoadedPacks(packs, loads)], lambda: (manifest, None), [])
    stream = PackStream(index, 2, 3)
    last = stream.iteration(stream.iterations_per_epoch - 1)
    assert np.count_nonzero(last == EMPTY_PACK) == 3
    ran = [sorted(int(tokens[pack]) for pack in rank if pack != EMPTY_PACK) for rank in last]
    assert sorted(ran) == [[40, 40], [80]]


def made(folder: Path, samples: int, ranks: int, micro_batches: int, **more: Any) -> PackedIndex:
    options = PackOptions(vit_budget=8, llm_budget=200, data_parallel_size=ranks, micro_batches=micro_batches, **more)
    return build_index(drawn(samples, 5, (10, 90)), folder / "index", options)[0]


@pytest.fixture
def index(tmp_path: Path) -> PackedIndex:
    return made(tmp_path, 301, 2, 3, last_iteration="empty")


def test_resume_at_another_data_parallel_size_runs_the_same_packs(index: PackedIndex) -> None:
    whole = [list(PackBatchSampler(index, 2, rank, micro_batches=3)) for rank in range(2)]
    first = PackBatchSampler(index, 2, 0, micro_batches=3)
    assert len([*islice(first, 6)]) == 6
    seen = []
    for rank in range(3):
        resumed = PackBatchSampler(index, 3, rank, micro_batches=2)
        resumed.load_state_dict(first.state_dict())
        seen += list(resumed)
    assert sorted(map(tuple, seen)) == sorted(tuple(pack) for packs in whole for pack in packs[6:])


@pytest.mark.parametrize("last_iteration", LAST_ITERATION)
@pytest.mark.parametrize("stored_epochs", [1, 3])
def test_every_epoch_has_every_sample_once(tmp_path: Path, last_iteration: str, stored_epochs: int) -> None:
    index = made(tmp_path, 1000, 4, 8, last_iteration=last_iteration, epochs=stored_epochs)
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
    for wrong, said in (((4, 0), "keep the product, or pack again"), ((2, 2), "rank 2 is not one of 2"),
                        ((2, 0, 0), "both must be 1 or more")):  # fmt: skip
        with pytest.raises(UserError, match=said):
            PackBatchSampler(index, *wrong)


@pytest.mark.starts
def test_the_example_runs_and_learns() -> None:
    command = [sys.executable, str(REPOSITORY / "examples" / "bare_loop.py")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines if line.startswith("step")]
    assert losses[-1] < 0.5 * losses[0]
