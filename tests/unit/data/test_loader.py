"""What training reads: an index of another dataset is refused by the field that differs, damage before it is used."""

from pathlib import Path

import numpy as np
import pytest

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.demo import make_demo_data
from megatron.vlm.data.job import open_job
from megatron.vlm.data.loader import Needs, PackDataset, first_iteration
from megatron.vlm.data.preprocess import preprocess
from megatron.vlm.data.samples import Recipe
from megatron.vlm.data.tiles import Tiling
from omnibal_ext.errors import UserError
from omnibal_ext.packing import Corpus, PackedIndex, PackOptions, build_index
from omnibal_ext.packing.dispatch import EMPTY_PACK

ALL = Needs(pixels=True, tokens=True, labels=True)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ChatDataset:
    folder = tmp_path_factory.mktemp("raw")
    make_demo_data(folder, samples=40, heldout_samples=1, seed=3)
    recipe = Recipe(folder, folder / "tokenizer.model", "internlm2-chat", Tiling(32, max_tiles=32), tokens_per_tile=4)
    preprocess(open_job([folder / "train.jsonl"], recipe, folder / "dataset"))
    return ChatDataset(folder / "dataset")


@pytest.fixture
def index(dataset: ChatDataset, tmp_path: Path) -> PackedIndex:
    options = PackOptions(vit_budget=40, llm_budget=400, data_parallel_size=2)
    built_from = {"data": {"manifest": dataset.manifest}}
    return build_index(Corpus.of_dataset(dataset.folder), tmp_path / "packs", options, built_from)[0]


def test_a_pack_holds_its_samples_end_to_end(dataset: ChatDataset, index: PackedIndex) -> None:
    batch = PackDataset(dataset, index, ALL)[0]
    samples = index.samples(0)
    assert batch.lengths == tuple(dataset.sizes.tokens[samples])
    assert batch.input_ids is not None
    assert batch.input_ids.tolist() == np.concatenate([dataset.tokens(int(i)) for i in samples]).tolist()


def test_an_empty_pack_counts_no_token(dataset: ChatDataset, index: PackedIndex) -> None:
    batch = PackDataset(dataset, index, ALL)[EMPTY_PACK]
    assert batch.samples == batch.tiles == 0
    assert batch.loss_mask is not None
    assert batch.loss_mask.sum() == 0


def test_an_index_of_another_dataset_is_refused_by_field(dataset: ChatDataset, index: PackedIndex) -> None:
    other = ChatDataset(dataset.folder)
    other.manifest = {**dataset.manifest, "tiling": {**dataset.manifest["tiling"], "max_tiles": 6}}
    with pytest.raises(UserError, match=r"manifest\.tiling\.max_tiles is 32, expected 6"):
        PackDataset(other, index, ALL)


def test_a_flipped_byte_is_found_before_training(dataset: ChatDataset, index: PackedIndex) -> None:
    path = index.folder / "sample_ids.npy"
    damaged = bytearray(path.read_bytes())
    damaged[-8] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"sample_ids\.npy: damaged"):
        PackDataset(dataset, PackedIndex.open(index.folder), ALL)


def test_a_position_inside_an_iteration_is_refused() -> None:
    assert first_iteration(48, 8) == 6
    with pytest.raises(UserError, match="global-batch-size"):
        first_iteration(50, 8)
