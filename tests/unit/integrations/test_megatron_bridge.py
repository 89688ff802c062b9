"""The packs of an index in the order in which training runs them, through samplers that Megatron's loops have."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.integrations.megatron_bridge import PackedIndexDataset
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes
from tests.unit.integrations.peers import drawn

RANKS, MICRO_BATCHES = 2, 3


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> PackedIndex:
    options = PackOptions("balanced", 12, 300, micro_batches=MICRO_BATCHES, data_parallel_size=RANKS)
    return build_index(Sizes.from_arrays(*drawn(600)), tmp_path_factory.mktemp("index") / "packs", options)[0]


class Numbers:
    def __getitem__(self, number: int) -> int:
        return number


def bridge_samplers() -> ModuleType:
    """Bridge's file of samplers; its package needs Transformer Engine."""
    found = [Path(folder, "megatron/bridge/data/samplers.py") for folder in sys.path]
    path = next((path for path in found if path.exists()), None)
    if path is None:
        pytest.skip("megatron-bridge is not installed here: docs/integrations.md says how to run these tests")
    spec = importlib.util.spec_from_file_location("bridge_samplers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cores_samplers() -> ModuleType:
    """Megatron-LM's, which is the same."""
    from megatron.training.datasets import data_samplers

    return data_samplers


@pytest.mark.parametrize("module", [cores_samplers, bridge_samplers])
@pytest.mark.parametrize("iterations_done", [0, 4])
def test_each_rank_reads_the_packs_that_the_index_gives_it(
    module: Callable[[], ModuleType], index: PackedIndex, iterations_done: int
) -> None:
    packs = PackedIndexDataset(Numbers(), index, RANKS, MICRO_BATCHES, join=list)
    stream = PackStream(index, RANKS, MICRO_BATCHES)
    consumed = iterations_done * RANKS * MICRO_BATCHES
    for rank in range(RANKS):
        sampler = module().MegatronPretrainingSampler(len(packs), consumed, 1, rank, RANKS)
        read = [packs.collate_fn([packs[n] for n in batch]) for batch in sampler]
        due = [index.samples(int(pack)).tolist() for number in range(iterations_done, stream.iterations_per_epoch)
               for pack in stream.iteration(number)[rank]]  # fmt: skip
        assert read == due


def test_an_epoch_has_every_sample(index: PackedIndex) -> None:
    packs = PackedIndexDataset(Numbers(), index, RANKS, MICRO_BATCHES, join=list)
    assert {sample for number in range(len(packs)) for sample in packs[number]} == set(range(600))
    with pytest.raises(IndexError):
        packs[len(packs)]
    assert len(PackedIndexDataset(Numbers(), index, RANKS, MICRO_BATCHES, list, epochs=2)) > 1.9 * len(packs)


def test_another_global_batch_is_refused(index: PackedIndex) -> None:
    with pytest.raises(UserError, match="packed for a global batch of 6 packs"):
        PackedIndexDataset(Numbers(), index, RANKS, 2, join=list)


def test_wide_packs_are_refused(tmp_path: Path) -> None:
    options = PackOptions("balanced", 12, 300, data_parallel_size=RANKS, micro_batches=MICRO_BATCHES, widths=(1, 2))
    tiles, tokens = drawn(600)
    tokens[:20] = 500
    wide, _ = build_index(Sizes.from_arrays(tiles, tokens), tmp_path / "packs", options)
    with pytest.raises(UserError, match="wider than a rank"):
        PackedIndexDataset(Numbers(), wide, RANKS, MICRO_BATCHES, join=list)
