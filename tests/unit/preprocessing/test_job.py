"""A dataset, and parts of one, are kept for the same inputs and recipe alone: each of what decides them by itself."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from examples.demo.data import train_tokenizer
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.preprocessing.job import CHECK_FIELDS, PreprocessJob, open_job
from megatron.vlm.preprocessing.recipe import Recipe
from omnibal_ext.errors import UserError
from omnibal_ext.families.qwen_vl.videos import Even
from omnibal_ext.reading.document import sealed

NATIVE = Tiling(14, 4, 64, False, "native")


@pytest.fixture(scope="module")
def words() -> bytes:
    return train_tokenizer()


@pytest.fixture
def start(tmp_path: Path, words: bytes) -> Recipe:
    for name in ("one", "two", "more"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"name": name}) + "\n")
    sets = {name: {"root": name, "annotation": f"{name}.jsonl", "max_dynamic_patch": 6} for name in ("one", "two")}
    (tmp_path / "meta.json").write_text(json.dumps(sets))
    (tmp_path / "tokenizer.model").write_bytes(words)
    return Recipe(tmp_path, tmp_path / "tokenizer.model", "internlm2-chat", NATIVE, markup="qwen3-vl")


def opened(recipe: Recipe) -> PreprocessJob:
    folder = recipe.tokenizer.parent
    return open_job([folder / "meta.json"], recipe, folder / "dataset")


def of_a_set(name: str, **changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        sets = json.loads((folder / "meta.json").read_text())
        sets[name] = {field: value for field, value in {**sets[name], **changes}.items() if value is not None}
        (folder / "meta.json").write_text(json.dumps(sets))

    return change


def turned_round(folder: Path) -> None:
    sets = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(dict(reversed(sets.items()))))


def other_tokenizer(folder: Path) -> None:
    """With an empty field of protobuf's behind it that nobody knows."""
    with (folder / "tokenizer.model").open("ab") as file:
        file.write(bytes([0xC2, 0x3E, 0x00]))


INPUTS: dict[str, Callable[[Path], object]] = {
    **{f"most tiles of set {name}": of_a_set(name, max_dynamic_patch=5) for name in ("one", "two")},
    **{f"no most tiles of set {name}": of_a_set(name, max_dynamic_patch=None) for name in ("one", "two")},
    **{f"weight of set {name}": of_a_set(name, repeat_time=2) for name in ("one", "two")},
    **{f"root of set {name}": of_a_set(name, root="more") for name in ("one", "two")},
    **{f"file of set {name}": of_a_set(name, annotation="more.jsonl") for name in ("one", "two")},
    "order of sets": turned_round,
    "contents of the same size": lambda folder: (folder / "two.jsonl").write_text('{"name": "owt"}\n'),
    "a line more": lambda folder: (folder / "two.jsonl").write_text('{"name": "two"}\n\n'),
    "contents of the tokenizer": other_tokenizer,
}
RECIPE: dict[str, Any] = {
    "image_root": lambda r: r.image_root / "one",
    "tokenizer": None,  # its contents are: see above
    "template": lambda _: "chatml",
    "tiling": lambda r: replace(r.tiling, max_tiles=65),
    "tokens_per_tile": lambda _: 64,
    "max_tokens": lambda _: 100,
    "shorten": lambda _: ("truncate",),
    "max_pixels": lambda r: r.max_pixels - 1,
    "decode_images": lambda _: True,
    "image_checksums": lambda _: False,
    "system_message": lambda _: "Be brief.",
    "normalization": lambda _: "clip",
    "markup": lambda _: "qwen-vl",
    "video": lambda _: Even(True, 4096, 8192),
    "further": None,  # test_sound_samples.py: it needs another markup
    "clock": None,  # test_video_sounds.py, as the next
    "use_audio_in_video": None,
}


def seen(job: PreprocessJob) -> bool:
    """Whether what is in the output folder is this job's. Raises UserError if it is another's."""
    return job.finished() is not None


@pytest.fixture
def finished(start: Recipe) -> PreprocessJob:
    job = opened(start)
    job.work.mkdir(parents=True)
    job.part_path(0).touch()
    job.output.mkdir()
    (job.output / "manifest.json").write_text(json.dumps(sealed({"made_from": job.identity})))
    return job


def test_what_was_made_of_the_same_is_kept(start: Recipe, finished: PreprocessJob) -> None:
    again = opened(start)
    assert seen(again)
    assert again.missing() == [1]


@pytest.mark.parametrize("name", INPUTS)
def test_another_input_makes_another_dataset_of_other_parts(name: str, start: Recipe, finished: PreprocessJob) -> None:
    INPUTS[name](start.tokenizer.parent)
    other = opened(start)
    assert 0 in other.missing()
    if name.startswith("root "):  # images may have moved: whether they are the same is seen by them
        assert seen(other)
        return
    with pytest.raises(UserError, match="holds a dataset made otherwise"):
        seen(other)


def test_every_field_of_a_recipe_is_tried() -> None:
    assert set(RECIPE) == {field.name for field in fields(Recipe)}


@pytest.mark.parametrize("name", [name for name, other in RECIPE.items() if other])
def test_another_recipe_makes_another_dataset_of_other_parts(name: str, start: Recipe, finished: PreprocessJob) -> None:
    """Looked at more closely, or elsewhere, images give the same dataset, of parts that say so."""
    other = opened(replace(start, **{name: RECIPE[name](start)}))
    assert other.missing() == [0, 1]
    if name in (*CHECK_FIELDS, "image_root"):
        assert seen(other)
    else:
        with pytest.raises(UserError, match="holds a dataset made otherwise"):
            seen(other)
