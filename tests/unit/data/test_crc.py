"""An image that is not what was preprocessed is found, wherever it lies, and named; unless nobody asks."""

import base64
import io
import json
import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from examples.demo.data import make_demo_data
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.formats import table
from megatron.vlm.data.manifest import read_media
from megatron.vlm.data.media.crc import crc_of
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.preprocess import preprocess
from megatron.vlm.preprocessing.recipe import Recipe
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import VISION
from tests.demo import dataset_of, demo_recipe, turns, written
from tests.media import tiles_of
from tests.unit.data.clips import inside

COUNT, SIDE = 6, 64
FORMATS = ("JPEG", "PNG", "BMP")
OLD = {"path": "a.png", "columns": 1, "rows": 1, "thumbnail": False}
SAID = turns("<image>\nabc?", "abc")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    make_demo_data(folder, samples=1, heldout_samples=1, seed=0)
    return folder


def encoded(seed: int, kind: str = "PNG") -> bytes:
    """Noise: files of a kind are of one length."""
    content = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), random.Random(seed).randbytes(3 * SIDE**2)).save(content, kind)
    return content.getvalue()


def loose(folder: Path) -> Path:
    for number in range(COUNT):
        (folder / f"{number}.img").write_bytes(encoded(number, FORMATS[number % 3]))
    return written(
        folder / "chat.jsonl", *({"image": f"{number}.img", "conversations": SAID} for number in range(COUNT))
    )


def recipe(words: Path, root: Path, **more: Any) -> Recipe:
    return replace(demo_recipe(words, max_tiles=6, **more), image_root=root)


def dataset(words: Path, file: Path, **more: Any) -> ChatDataset:
    return dataset_of(file, recipe(words, file.parent, **more), file.parent / "data")


def faults(data: ChatDataset) -> list[int]:
    found = []
    for sample in range(len(data)):
        try:
            tiles_of(data.sample(sample))
        except UserError as error:
            found += [sample] if "\n" not in str(error) else []
    return found


@pytest.mark.parametrize("kind", ["loose", "tar", "base64", "parquet"])
def test_another_picture_is_found_wherever_it_lies(words: Path, tmp_path: Path, kind: str) -> None:
    contents = [encoded(number) for number in range(COUNT)]
    path = loose(tmp_path) if kind == "loose" else inside(kind, tmp_path, "image", contents, SAID)
    data = dataset(words, path)
    assert faults(data) == []
    changed = tmp_path / "1.img" if kind == "loose" else path
    one, other = changed.read_bytes() if kind == "loose" else contents[1], encoded(99)
    if kind == "base64":
        one, other = base64.b64encode(one), base64.b64encode(other)
    content = changed.read_bytes()
    assert content.count(one) == 1
    assert len(one) == len(other) or kind == "loose"
    changed.write_bytes(content.replace(one, other))
    table._open.cache_clear()  # another process opens the file anew
    assert faults(ChatDataset(data.folder)) == [1]
    with pytest.raises(UserError, match=rf"{changed}: is not what was preprocessed: CRC-32 .*; sample 1 of"):
        tiles_of(data.sample(1))
    assert faults(ChatDataset(data.folder, checks_images=False)) == []


def test_the_number_is_that_of_the_encoded_file(words: Path, tmp_path: Path) -> None:
    data = dataset(words, loose(tmp_path))
    for sample in range(COUNT):
        content = (tmp_path / f"{sample}.img").read_bytes()
        assert data.sample(sample).images[0].crcs == (zlib.crc32(content),)
    large = tmp_path / "large"
    large.write_bytes(random.Random(0).randbytes(2**21 + 5))
    assert crc_of(large) == zlib.crc32(large.read_bytes())


def test_datasets_without_numbers_are_read_as_they_are(words: Path, tmp_path: Path) -> None:
    """Made with the flag, or before there were any."""
    data = dataset(words, loose(tmp_path), image_checksums=False)
    assert [image.crcs for sample in range(COUNT) for image in data.sample(sample).images] == [()] * COUNT
    (tmp_path / "1.img").write_bytes(encoded(99))
    assert faults(data) == []
    assert read_media({"images": json.dumps([OLD]).encode()})[VISION][0].crcs == ()


@pytest.mark.parametrize("crcs", [[1, 2], [-1], [2**32], ["1"], 7, [True]])
def test_numbers_that_make_no_sense_are_refused(crcs: object) -> None:
    with pytest.raises(UserError, match=r"crcs|CRCs"):
        read_media({"images": json.dumps([{**OLD, "crcs": crcs}]).encode()})


@pytest.mark.parametrize("workers", [1, 2])
def test_images_of_a_dataset_that_is_there_are_looked_at_again(words: Path, tmp_path: Path, workers: int) -> None:
    data = dataset(words, loose(tmp_path))
    again = open_job([tmp_path / "chat.jsonl"], recipe(words, tmp_path, decode_images=True), data.folder)
    assert preprocess(again, workers) == data.manifest
    (tmp_path / "3.img").write_bytes(encoded(98, "JPEG"))
    (tmp_path / "4.img").write_bytes(b"no image")
    dataset(words, tmp_path / "chat.jsonl")  # that is no reason to look
    with pytest.raises(UserError, match=r"2 of 6 samples have images that cannot be used, .*3\.img: is not what"):
        preprocess(again, workers)
    unchecked = recipe(words, tmp_path, decode_images=True, image_checksums=False)
    with pytest.raises(UserError, match=r"1 of 6 samples .*4\.img: cannot be decoded"):
        preprocess(open_job([tmp_path / "chat.jsonl"], unchecked, data.folder), workers)
