"""The stream of packs: every pack once an epoch, a position is all it takes to resume, the same at any DP size."""

from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.index.dispatch import EMPTY_PACK, PackStream, assign_zigzag, epoch_iterations
from omnibal_ext.packing.index.packed_index import PackedIndex, write_index
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.packing.packs import PackList, offsets_of
from omnibal_ext.sizes import Sizes
from tests.unit.packing.corpora import made_up_manifest


def index_of(
    folder: Path, epoch_packs: list[int], global_batch: int, last_iteration: str = "next_epoch"
) -> PackedIndex:
    count = sum(epoch_packs)
    packs = PackList(offsets_of(np.ones(count, np.int64)), np.arange(count))
    manifest = made_up_manifest(global_batch=global_batch, last_iteration=last_iteration, epoch_packs=epoch_packs)
    return write_index(folder, packs, np.ones((count, 3), np.int64), manifest, [], over=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("index")


def test_another_data_parallel_size_runs_the_same_packs(folder: Path) -> None:
    index = index_of(folder / "ranks", [50], 8)
    for i in range(20):
        packs = {(d, m): set(PackStream(index, d, m).iteration(i).ravel()) for d, m in ((1, 8), (2, 4), (8, 1))}
        assert packs[1, 8] == packs[2, 4] == packs[8, 1]


@pytest.mark.parametrize(("ranks", "limit"), [(2, 0.2), (4, 0.2), (8, 1.0)])
def test_ranks_are_balanced_at_any_data_parallel_size_and_at_an_epochs_end(
    tmp_path: Path, ranks: int, limit: float
) -> None:
    """Against packs assigned at random, unequal as built; rare light ones come by fours, which balance no eight."""
    generator = np.random.default_rng(0)
    sizes = Sizes.from_arrays(generator.integers(0, 9, 3000), generator.integers(20, 900, 3000))
    options = PackOptions(vit_budget=24, llm_budget=2500, data_parallel_size=4, micro_batches=4, seconds=0)
    index, _ = build_index(sizes, tmp_path / "index", options)
    stream = PackStream(index, ranks, 16 // ranks)
    iterations = stream.iterations(0, stream.first_iteration(3))
    seconds = index.seconds(np.arange(index.num_packs))
    at_random = generator.permuted(iterations.reshape(-1, 16), axis=1).reshape(iterations.shape)
    assert wait(rank_loads(iterations, seconds)) < limit * wait(rank_loads(at_random, seconds))


def test_another_global_batch_is_refused_with_the_reason(folder: Path) -> None:
    index = index_of(folder / "batch", [50], 8)
    with pytest.raises(UserError, match=r"global batch of 8 packs.*are 6"):
        PackStream(index, 3, 2)


def test_epoch_iterations_count_the_incomplete_one(folder: Path) -> None:
    stream = PackStream(index_of(folder / "dump", [21], 8), 2, 4)
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
    stream = PackStream(write_index(tmp_path / "index", packs, loads, manifest, []), 2, 3)
    last = stream.iteration(stream.iterations_per_epoch - 1)
    assert np.count_nonzero(last == EMPTY_PACK) == 3
    ran = [sorted(int(tokens[pack]) for pack in rank if pack != EMPTY_PACK) for rank in last]
    assert sorted(ran) == [[40, 40], [80]]
