"""The index on disk: what is written is read, damage and mismatch are named."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex, write_index
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.pack_epoch import Epoch, pack_epoch
from omnibal_ext.sizes import Sizes

SIZES = Sizes.from_arrays([1, 2, 3, 4, 9, 1, 0, 2], [10, 20, 30, 40, 20, 70, 5, 101])
CORPUS = Corpus(SIZES, (CorpusSource("a.json", 4), CorpusSource("b.json", 4)))
OPTIONS = PackOptions(method="isf", vit_budget=5, llm_budget=100, data_parallel_size=2)


@pytest.fixture
def index(tmp_path: Path) -> PackedIndex:
    return build_index(CORPUS, tmp_path / "packs", OPTIONS, {"corpus": "eight"})[0]


def test_packs_come_back_as_written(index: PackedIndex) -> None:
    assert all(isinstance(array, np.memmap) for array in (index.sample_ids, index.loads)), "opening reads no array"
    packs = [index.samples(pack) for pack in range(index.num_packs)]
    assert sorted(np.concatenate(packs).tolist()) == [0, 1, 2, 3, 5, 6]
    for pack, samples in enumerate(packs):
        assert samples.dtype == np.int64
        assert index.loads[pack].tolist() == [
            SIZES.tiles[samples].sum(), SIZES.tokens[samples].sum(), (SIZES.tokens[samples] ** 2).sum()
        ]  # fmt: skip
    assert (index.vit_budget, index.llm_budget, index.pad, index.global_batch) == (5, 100, False, 2)


def test_what_is_left_out_is_written_down_with_place_and_reason(index: PackedIndex) -> None:
    lines = [json.loads(line) for line in (index.folder / "rejected.jsonl").read_text().splitlines()]
    assert [(line["sample"], line["file"], line["row"], line["reason"]) for line in lines] == [
        (4, "b.json", 0, "too many tiles"),
        (7, "b.json", 3, "too many tokens"),
    ]
    assert index.manifest["samples"] + index.manifest["rejected"] == len(SIZES)


def test_the_same_seed_gives_the_same_bytes(index: PackedIndex, tmp_path: Path) -> None:
    again = build_index(CORPUS, tmp_path / "again", OPTIONS, {"corpus": "eight"})[0]
    assert again.manifest == index.manifest
    for name in index.manifest["checksums"]:
        assert (index.folder / name).read_bytes() == (again.folder / name).read_bytes()


@pytest.mark.parametrize("name", ["sample_ids.npy", "pack_offsets.npy", "pack_loads.npy", "rejected.jsonl"])
def test_a_flipped_byte_is_found(index: PackedIndex, name: str) -> None:
    index.verify()
    damaged = bytearray((index.folder / name).read_bytes())
    damaged[-1] ^= 1
    (index.folder / name).write_bytes(damaged)
    with pytest.raises(UserError, match=name):
        PackedIndex.open(index.folder).verify()


def test_a_mismatch_of_nested_fields_names_the_innermost(index: PackedIndex, tmp_path: Path) -> None:
    built_from = {"data": {"manifest": {"tiling": {"rule": "internvl", "max_tiles": 12}, "chat_template": "chatml"}}}
    index = build_index(CORPUS, tmp_path / "nested", OPTIONS, built_from)[0]
    dataset: dict[str, Any] = json.loads(json.dumps(built_from["data"]["manifest"]))
    index.check({"built_from.data.manifest": dataset})
    dataset["tiling"]["max_tiles"] = 6
    with pytest.raises(UserError, match=r"built_from.data.manifest.tiling.max_tiles is 12, not 6; pack again"):
        index.check({"built_from.data.manifest": dataset})


@pytest.mark.parametrize("change", [lambda array: array[:-1], lambda array: array.astype(np.int32)])
def test_an_array_of_another_shape_or_type_is_refused_when_opened(
    index: PackedIndex, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    path = index.folder / "sample_ids.npy"
    np.save(path, change(np.load(path)))
    with pytest.raises(UserError, match=r"sample_ids.npy: has shape .* pack again"):
        PackedIndex.open(index.folder)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="no packed index"):
        build_index(SIZES, tmp_path, OPTIONS)
    assert (tmp_path / "thesis.tex").exists()
    assert [path.name for path in tmp_path.parent.iterdir() if path.name.startswith(f".{tmp_path.name}")] == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"llm_budget": 90}, "sample_llm_budget is 100, not 90"),
        ({"seed": 1}, "seed is 0, not 1"),
        ({"micro_batches": 2}, "micro_batches is 1, not 2"),
        ({"method": "random"}, "method is 'isf', not 'random'"),
    ],
)
def test_an_index_of_other_content_is_not_written_over(index: PackedIndex, change: dict[str, Any], field: str) -> None:
    """A run on it could never be resumed. It is said before any packing."""
    before = {path.name: path.read_bytes() for path in index.folder.iterdir()}

    def never(*_: Any) -> Epoch:
        raise AssertionError

    with pytest.raises(UserError, match=rf"packs: holds an index made otherwise \({field}\); choose another folder"):
        build_index(CORPUS, index.folder, replace(OPTIONS, **change), {"corpus": "eight"}, packer=never)
    with pytest.raises(UserError, match=r"built_from.corpus is 'eight', not 'nine'"):
        build_index(CORPUS, index.folder, OPTIONS, {"corpus": "nine"}, packer=never)
    assert {path.name: path.read_bytes() for path in index.folder.iterdir()} == before
    build_index(CORPUS, index.folder, OPTIONS, {"corpus": "eight"})
    assert {path.name: path.read_bytes() for path in index.folder.iterdir()} == before


def test_packs_that_come_out_otherwise_are_not_written_over_either(index: PackedIndex, tmp_path: Path) -> None:
    """From the same request, by another version of the packer; nor is an index that cannot be read."""
    epoch = pack_epoch(CORPUS, np.zeros(8, np.int8), replace(OPTIONS, epochs=1), index.costs, 0)
    with pytest.raises(UserError, match=r"holds an index made otherwise \((packs|checksums|samples)"):
        write_index(index.folder, epoch.pieces, lambda: (index.manifest, None), [])
    index.verify()
    (index.folder / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="choose another folder: --output-dir, or --run-dir"):
        build_index(CORPUS, index.folder, OPTIONS, {"corpus": "eight"})


def test_an_index_of_version_1_still_opens_and_runs(index: PackedIndex) -> None:
    path = index.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for name in ("loads", "costs", "epoch_parts", "one_sum", "budgets", "seconds", "pipeline_model_parallel_size"):
        del manifest[name]
    path.write_text(json.dumps({**manifest, "version": 1}))
    old = PackedIndex.open(index.folder)
    first = PackStream(old, 2, 1).iteration(0)
    assert first.tolist() == PackStream(index, 2, 1).iteration(0).tolist()
    assert old.seconds(first.ravel()).shape == (2, 2)


def test_a_manifest_that_was_changed_is_refused(index: PackedIndex) -> None:
    """Values that could be, but are not those that were written."""
    path = index.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "seed": manifest["seed"] + 1}))
    with pytest.raises(UserError, match=r"manifest\.json"):
        PackedIndex.open(index.folder)


def test_samples_are_those_of_the_dataset(index: PackedIndex) -> None:
    """The largest number in the packs is 6: a dataset of seven holds it, one of six does not."""
    index.check_samples(7)
    with pytest.raises(UserError, match=r"sample_ids.npy: names sample 6 of 6"):
        index.check_samples(6)
