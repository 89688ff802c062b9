"""The dataset folder gives back what conversations and pictures were; too many rejects are told what mends them."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.images import pixels_of
from megatron.vlm.data.rejects import REMEDIES, RejectCount
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import sha256_of, verify_checksums
from omnibal_ext.reading.document import sealed
from tests.demo import demo_dataset
from tests.programs import ROOT

SAMPLES = 60


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> ChatDataset:
    return demo_dataset(tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("out") / "dataset", SAMPLES, seed=5)


def test_sizes_tokens_and_images_agree(dataset: ChatDataset) -> None:
    manifest = dataset.manifest
    assert len(dataset) == len(dataset.sizes) == SAMPLES
    for sample in range(SAMPLES):
        tokens, tiles = dataset.sample(sample).text[0], int(dataset.sizes.tiles[sample])
        assert tokens.dtype == np.int32
        assert len(tokens) == dataset.sizes.tokens[sample] == len(dataset.sample(sample).text[1])
        assert tokens.max() < manifest["vocab_size"]
        assert (tokens == manifest["image_token_id"]).sum() == tiles * manifest["tokens_per_tile"]
        assert tiles == sum(image.tiles for image in dataset.sample(sample).images)
        assert pixels_of(dataset.sample(sample)).shape == (tiles, 3, 32, 32)


def test_a_folder_without_dataset_or_of_another_version_is_refused(dataset: ChatDataset, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="omnibal preprocess"):
        ChatDataset(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({**dataset.manifest, "schema_version": 99}))
    with pytest.raises(UserError, match="99"):
        ChatDataset(tmp_path)


@pytest.mark.parametrize("name", ["tokens", "loss_mask", "media"])
def test_flipped_bits_are_found(dataset: ChatDataset, tmp_path: Path, name: str) -> None:
    mine = tmp_path / "dataset"
    shutil.copytree(dataset.folder, mine)
    ChatDataset(mine).verify()
    positions = np.random.default_rng(0)
    for path in (mine / f"{name}.bin", mine / f"{name}.idx", mine / "sizes.npz", mine / "rejected.jsonl"):
        whole = path.read_bytes()
        if whole:
            damaged = bytearray(whole)
            damaged[positions.integers(len(whole))] ^= 1 << int(positions.integers(8))
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=f"{path.name}: damaged"):
                ChatDataset(mine).verify()
            path.write_bytes(whole)
    ChatDataset(mine).verify()
    (mine / f"{name}.bin").unlink()
    with pytest.raises(UserError, match=f"{name}.bin: cannot be read"):
        verify_checksums(mine, dataset.manifest["checksums"], "preprocess again")


@pytest.mark.parametrize("size", [0, -1, 1])
def test_a_column_has_as_many_bytes_as_its_index_says(dataset: ChatDataset, tmp_path: Path, size: int) -> None:
    """Seen as a dataset is opened, before its data are read; core's own readers find a document for each sample."""
    mine = tmp_path / "dataset"
    shutil.copytree(dataset.folder, mine)
    for name in ("tokens", "loss_mask", "media"):
        assert IndexedDataset(str(mine / name)).document_indices.tolist() == list(range(SAMPLES + 1))
        path, whole = mine / f"{name}.bin", (mine / f"{name}.bin").read_bytes()
        path.write_bytes(whole + b"\0" if size > 0 else whole[:size])
        with pytest.raises(UserError, match=rf"{name}\.bin: has (\d+ bytes where|no bytes).* preprocess again"):
            ChatDataset(mine)
        path.write_bytes(whole)
    index = mine / "tokens.idx"
    index.write_bytes(index.read_bytes()[:-1])
    manifest = {**dataset.manifest, "checksums": {**dataset.manifest["checksums"], "tokens.idx": sha256_of(index)}}
    (mine / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(UserError, match=r"tokens\.bin: cannot be read by its index .* preprocess again"):
        ChatDataset(mine)


def test_the_last_word_of_the_vocabulary_is_one_and_the_next_is_none(
    dataset: ChatDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, _ = dataset.sample(0).text
    manifest = dataset.manifest
    monkeypatch.setattr(dataset, "manifest", {**manifest, "vocab_size": int(tokens.max()) + 1})
    assert dataset.sample(0).text[0].tolist() == tokens.tolist()
    monkeypatch.setattr(dataset, "manifest", {**manifest, "vocab_size": int(tokens.max())})
    with pytest.raises(UserError, match="sample 0 has token ids behind the vocabulary"):
        _ = dataset.sample(0).text


def documented() -> set[str]:
    page = (ROOT / "docs/rejected.md").read_text().partition("\n##")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    return {reason for row in rows for reason in re.findall(r"`(\w+)`", row)}


def test_every_reason_has_a_remedy() -> None:
    assert documented()
    assert documented() == set(REMEDIES)


@pytest.mark.parametrize("reason", sorted(REMEDIES))
def test_the_remedy_is_that_of_most_rejects(reason: str) -> None:
    """Of images that are not found it names where paths start."""
    other, count = "bad_roles" if reason != "bad_roles" else "not_utf8", RejectCount()
    rows = [{"file": "chat.jsonl", "line": 1, "reason": one, "detail": "it"} for one in (reason, other, reason)]
    count.add(rows)
    with pytest.raises(UserError, match="--max-rejects 3") as refused:
        count.check(1, 130, Path("rejected.jsonl"))
    assert REMEDIES[reason] in str(refused.value)
    if reason in ("missing_image", "missing_video", "path_outside_root"):
        assert "--image-root" in str(refused.value)
