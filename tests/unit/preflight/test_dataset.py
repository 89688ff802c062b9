"""A dataset is refused unless it is made for the model, everything at once, with the flags that mend it."""

import hashlib
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.demo.data import train_tokenizer
from megatron.vlm.preflight.dataset import _rules, _token_ids, check_dataset, check_lengths, longest_positions
from megatron.vlm.preprocessing.tokenizer import load_tokenizer
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.language.rope import RopeScaling
from omnibal_ext.packing.index.packed_index import PackedIndex, write_index
from omnibal_ext.packing.packs import LoadedPacks, PackList
from omnibal_ext.sizes import Sizes
from tests.languages import altered
from tests.unit.packing.corpora import made_up_manifest

TINY, LLAVA = preset("tiny"), preset("llava-1.6-mistral-7b")
SPECIAL = ("<img>", "<IMG_CONTEXT>")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "made-with" / "tokenizer.model"
    path.parent.mkdir()
    path.write_bytes(train_tokenizer())
    return path


@pytest.fixture
def manifest(tokenizer: Path) -> dict[str, Any]:
    opened, content = load_tokenizer(tokenizer, SPECIAL), tokenizer.read_bytes()
    vocabulary = {"size": opened.vocabulary_size, "sha256": opened.vocabulary_hash()}
    file = {"path": str(tokenizer), "sha256": hashlib.sha256(content).hexdigest(), "vocabulary": vocabulary}
    return {
        "samples": 3, "tokenizer": file, "image_markup": "internvl", "vocab_size": opened.vocab_size,
        "special_tokens": {token: opened.token_id(token) for token in SPECIAL}, "tile_size": 32, "tokens_per_tile": 4,
        "image_token_id": opened.token_id("<IMG_CONTEXT>"), "normalization": "imagenet",
        "tiling": {"rule": "internvl", "min_tiles": 1, "max_tiles": 32, "thumbnail": False},
    }  # fmt: skip


@pytest.fixture
def model(tmp_path: Path, tokenizer: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.model").write_bytes(tokenizer.read_bytes())
    return folder


HEARD = {"rate": 16000, "window": 400, "hop": 160, "longest": 300}
SIZES = {"layers": 1, "hidden_size": 8, "heads": 1, "ffn_hidden_size": 8}
ENCODER = {"mel_bins": 128, "chunk": 200, "channels": 0, "pooled": True}


@pytest.mark.parametrize(
    ("change", "fits"),
    [({}, True), *(({name: value + 1}, False) for name, value in HEARD.items()),
     *(({"encoder": {**ENCODER, name: value + 1}}, False) for name, value in ENCODER.items()),
     ({"encoder": {**ENCODER, "layers": 7}}, True)],
)  # fmt: skip
def test_sounds_must_have_been_heard_as_the_model_hears(
    change: dict[str, Any], fits: bool, manifest: dict[str, Any]
) -> None:
    hears = preset("qwen2.5-omni-3b")
    rule = {**HEARD, "encoder": ENCODER, **change}
    rule["encoder"] = {**SIZES, **rule["encoder"]}
    said = {"audio": rule, "audio_token_id": hears.prompt.further_token_ids["frames"]}
    assert (not [*_rules({**manifest, **said}, hears, None)]) is fits
    said["image_token_id"] = hears.prompt.image_token_id or 0
    assert not [*_token_ids({**manifest, **said}, hears, None)]
    assert [*_token_ids({**manifest, **said, "audio_token_id": 7}, hears, None)]
    assert not [*_rules(manifest, hears, None)]
    assert [*_rules({**manifest, **said}, TINY, None)]


def refusal(manifest: dict[str, Any], architecture: Any = TINY, folder: Path | None = None) -> str:
    with pytest.raises(UserError) as error:
        check_dataset(Path("data"), manifest, architecture, folder)
    return str(error.value)


def flags_of(message: str) -> dict[str, str]:
    words = shlex.split(message.partition("preprocess again with ")[2])
    return dict(zip(words[::2], words[1::2], strict=True))


def test_what_fits_passes(manifest: dict[str, Any], model: Path) -> None:
    assert "3 samples" in check_dataset(Path("data"), manifest, TINY, None)
    assert str(model) in check_dataset(Path("data"), manifest, TINY, model)


def test_all_that_differs_is_said_at_once_with_the_flags_that_mend_it(manifest: dict[str, Any]) -> None:
    manifest["vocab_size"] = LLAVA.language.vocab_size + 1
    message = refusal(manifest, LLAVA)
    for words in ("--tile-size 32, not 336", "--tokens-per-tile 4, not 576", "--normalize imagenet, not clip",
                  "--tiling internvl, not anyres", "--image-markup internvl, not llava",
                  "vocabulary ends at 32064"):  # fmt: skip
        assert words in message
    assert "\n" not in message
    assert flags_of(message) == {
        "--tile-size": "336", "--tokens-per-tile": "576", "--normalize": "clip", "--tiling": "anyres",
        "--image-markup": "llava", "--tokenizer-model": "TOKENIZER_OF_THE_MODEL",
    }  # fmt: skip


@pytest.mark.parametrize("field", ["vocab_size", "image_token_id"])
def test_ids_behind_the_vocabulary_are_refused(manifest: dict[str, Any], field: str) -> None:
    last = TINY.language.vocab_size - (field == "image_token_id")
    for value, fits in ((last, True), (last + 1, False), (600, False)):
        manifest[field] = value
        if fits:
            check_dataset(Path("data"), manifest, TINY, None)
        else:
            assert "the vocabulary ends at 512" in refusal(manifest)


def test_the_image_token_is_the_models(manifest: dict[str, Any], model: Path) -> None:
    for name in ("image_token_id", "image_token_index"):
        (model / "config.json").write_text(json.dumps({name: manifest["image_token_id"]}))
        check_dataset(Path("data"), manifest, TINY, model)
        (model / "config.json").write_text(json.dumps({name: 400}))
        assert f"image token {manifest['image_token_id']}, not 400" in refusal(manifest, TINY, model)


def other_vocabulary(folder: Path, special: dict[str, int], words: list[str]) -> None:
    """A tokenizer.json in the model's folder: characters and `words`, special tokens where they are asked for."""
    tokenizers = pytest.importorskip("tokenizers")
    (folder / "tokenizer.model").unlink()
    size = max(special.values()) + 1
    vocabulary = {f"unused{number}": number for number in range(size) if number not in special.values()} | special
    vocabulary |= {word: size + number for number, word in enumerate(words)}
    opened = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="unused0"))
    opened.save(str(folder / "tokenizer.json"))


def test_a_tokenizer_with_other_special_tokens_is_refused_by_the_token(manifest: dict[str, Any], model: Path) -> None:
    special = manifest["special_tokens"]
    other_vocabulary(model, {**special, "<img>": special["<img>"] + 40}, [])
    message = refusal(manifest, TINY, model)
    assert f"<img> is {special['<img>']}, not {special['<img>'] + 40}" in message
    assert flags_of(message)["--tokenizer-model"] == str(model / "tokenizer.json")


@pytest.mark.parametrize("words", [[], ["a"], ["a", "word", "more"]])
def test_another_vocabulary_is_refused_of_any_size(manifest: dict[str, Any], model: Path, words: list[str]) -> None:
    other_vocabulary(model, manifest["special_tokens"], words)
    assert "another vocabulary" in refusal(manifest, TINY, model)


def index_of(folder: Path, tokens: list[int], packed: list[int]) -> tuple[PackedIndex, Sizes]:
    packs = PackList(np.array([0, len(packed)]), np.array(packed))
    loads = np.zeros((1, 3), dtype=np.int64)
    manifest = made_up_manifest(global_batch=1, epoch_packs=[1])
    index = write_index(folder, [LoadedPacks(packs, loads)], lambda: (manifest, None), [])
    return index, Sizes.from_arrays([0] * len(tokens), tokens)


def test_only_samples_in_the_packs_count_against_the_positions(tmp_path: Path) -> None:
    index, sizes = index_of(tmp_path / "packs", [5, 99, 12, 13], packed=[3, 0, 2])
    assert "13 tokens" in check_lengths(index, sizes, 13)
    assert "no limit" in check_lengths(index, sizes, None)
    with pytest.raises(UserError, match=r"sample 3 has 13 tokens; 2 in all .* 11 positions; .*--llm-budget 11"):
        check_lengths(index, sizes, 11)


def test_positions_end_where_the_model_or_its_folder_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic scaling that the run knows of is no limit."""
    limited, shorter = (replace(TINY, language=replace(TINY.language, max_positions=most)) for most in (100, 70))
    scaling = RopeScaling("dynamic", 2.0, original_positions=64)
    dynamic = replace(TINY, language=altered(TINY.language, scaling=scaling))
    assert longest_positions(TINY, None) is None
    for folder, model, longest in ((limited, TINY, 100), (limited, shorter, 70), (dynamic, dynamic, None),
                                   (dynamic, TINY, 64)):  # fmt: skip
        monkeypatch.setattr("megatron.vlm.preflight.dataset.read_architecture", lambda _, folder=folder: folder)
        assert longest_positions(model, tmp_path) == longest
    assert longest_positions(dynamic, tmp_path, padded=True) == 64
