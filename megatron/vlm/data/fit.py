"""Does a dataset fit the model that is to read it? Tiles, tokenizer and longest sample; all that differs at once."""

import hashlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.vlm.data.tiles import RULES
from megatron.vlm.data.tokenizer import load_tokenizer
from omnibal_ext.errors import UserError
from omnibal_ext.huggingface import CONFIG, read_architecture, read_config
from omnibal_ext.model_data import Architecture
from omnibal_ext.packing.index import PackedIndex
from omnibal_ext.sizes import Sizes

TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")
PROBE = (
    "The quick brown fox, 3.14 x 10^-8 m/s²: déjà vu?\n\tdef f(x): return {'a': [x, 2]}\n"
    "Привет, мир! 你好世界。 こんにちは。 안녕하세요. مرحبا 🙂 https://example.org/?q=1&r=%20"
)
"""Words of several scripts, numbers and code: two tokenizers that cut it alike, and agree in size, count as one."""


@dataclass(frozen=True)
class Mismatch:
    """One thing that a dataset has otherwise than the model; preprocessing with `flag` `wanted` mends it."""

    what: str
    flag: str
    wanted: object


def check_dataset(
    folder: Path, manifest: Mapping[str, Any], architecture: Architecture, model_folder: Path | None
) -> str:
    """What was compared, in a few words; `model_folder` holds the weights' config.json and tokenizer, if there is one.

    Raises UserError naming everything in which the dataset is made for another model, and the command that mends it.
    """
    unlike = [*_tile_mismatches(manifest, architecture), *_token_mismatches(manifest, architecture, model_folder)]
    if unlike:
        command = preprocess_command(manifest, {mismatch.flag: mismatch.wanted for mismatch in unlike})
        raise UserError(
            f"dataset {folder}: not made for {architecture.name!r}: {', '.join(one.what for one in unlike)}; make it "
            f"again: {command}"
        )
    compared = f"with {model_folder}" if tokenizer_file(model_folder) else "in size only, no tokenizer beside weights"
    return f"{manifest['samples']} samples fit; tokenizer compared {compared}"


def _tile_mismatches(manifest: Mapping[str, Any], architecture: Architecture) -> Iterator[Mismatch]:
    rule = manifest["tiling"]["rule"]
    for flag, made, wanted in (
        ("--tile-size", manifest["tile_size"], architecture.vision.image_size),
        ("--tokens-per-tile", manifest["tokens_per_tile"], architecture.image_tokens_per_tile),
        ("--normalize", manifest["normalization"], architecture.vision.pixels),
        # Any rule serves a model that reads tile by tile, only one serves a model that joins them.
        ("--tiling", rule, "anyres" if architecture.newline else "internvl" if RULES[rule].joins_tiles else rule),
    ):
        if made != wanted:
            yield Mismatch(f"{flag} {made}, not {wanted}", flag, wanted)


def _token_mismatches(
    manifest: Mapping[str, Any], architecture: Architecture, model_folder: Path | None
) -> Iterator[Mismatch]:
    file = tokenizer_file(model_folder)
    mend = ("--tokenizer-model", file or "TOKENIZER_OF_THE_MODEL")
    ids = max(manifest["vocab_size"], manifest["image_token_id"] + 1)
    if ids > architecture.language.vocab_size:
        yield Mismatch(f"token ids up to {ids - 1}, the vocabulary ends at {architecture.language.vocab_size}", *mend)
    declared = _declared_image_token(model_folder)
    if declared not in (None, manifest["image_token_id"]):
        yield Mismatch(f"image token {manifest['image_token_id']}, not {declared}", *mend)
    if file and (unlike := _unlike(manifest, file)):
        yield Mismatch(f"tokenizer {manifest['tokenizer']['path']}, not {file}: {unlike}", *mend)


def tokenizer_file(model_folder: Path | None) -> Path | None:
    """The tokenizer that lies beside a model's weights."""
    files = [model_folder / name for name in TOKENIZER_FILES] if model_folder else []
    return next((file for file in files if file.is_file()), None)


def _declared_image_token(model_folder: Path | None) -> int | None:
    config = read_config(model_folder / CONFIG) if model_folder else {}
    token = config.get("image_token_id", config.get("image_token_index"))
    return None if token is None else int(token)


def _unlike(manifest: Mapping[str, Any], file: Path) -> str:
    """In what a model's tokenizer differs from the dataset's: special tokens, vocabulary, how it cuts text; or ""."""
    digest = manifest["tokenizer"]["sha256"]
    if any(_sha256(file.with_name(name)) == digest for name in TOKENIZER_FILES):
        return ""
    special = manifest["made_from"]["recipe"]["special_tokens"]
    model = load_tokenizer(file, tuple(special))
    for token, number in special.items():
        if model.token_id(token) != number:
            return f"{token} is {number}, not {model.token_id(token)}"
    if model.vocab_size != manifest["vocab_size"]:
        return f"{manifest['vocab_size']} tokens, not {model.vocab_size}"
    made_with = Path(manifest["tokenizer"]["path"])
    if _sha256(made_with) == digest:
        ids = load_tokenizer(made_with, tuple(special)).encode(PROBE).ids.tolist()
        return "" if ids == model.encode(PROBE).ids.tolist() else "it cuts text otherwise"
    return ""


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def preprocess_command(manifest: Mapping[str, Any], changes: Mapping[str, object]) -> str:
    """The command that makes such a dataset again with other flags, in a new folder."""
    tiling, recipe = manifest["tiling"], manifest["made_from"]["recipe"]
    flags = {
        "--image-root": manifest["image_root"],
        "--tokenizer-model": manifest["tokenizer"]["path"],
        "--chat-template": manifest["chat_template"],
        "--tiling": tiling["rule"],
        "--tile-size": manifest["tile_size"],
        "--tokens-per-tile": manifest["tokens_per_tile"],
        "--normalize": manifest["normalization"],
        "--min-tiles": tiling["min_tiles"],
        "--max-tiles": tiling["max_tiles"],
        "--max-tokens": recipe["max_tokens"],
        "--system-message": recipe["system_message"],
        **changes,
        "--output-dir": "NEW_FOLDER",
    }
    words = ["python", "tools/preprocess_data.py", "--input", *(source["file"] for source in manifest["sources"])]
    words += [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
    return shlex.join(words if tiling["thumbnail"] else [*words, "--no-thumbnail"])


def check_lengths(index: PackedIndex, sizes: Sizes, limit: int | None) -> str:
    """Raise UserError if a sample in the packs is longer than the model's positions; samples left out do not count."""
    samples = np.unique(index.sample_ids)
    longest = int(samples[np.argmax(sizes.tokens[samples])])
    tokens = int(sizes.tokens[longest])
    if limit is not None and tokens > limit:
        count = int((sizes.tokens[samples] > limit).sum())
        raise UserError(
            f"packs {index.folder}: sample {longest} has {tokens} tokens; {count} in all have more than the "
            f"model's {limit} positions; pack again with --llm-budget {limit} or less, which leaves them out"
        )
    return f"{tokens} tokens, " + (f"the model has {limit} positions" if limit else "the model sets no limit")


def longest_positions(architecture: Architecture, model_folder: Path | None) -> int | None:
    """Tokens up to which positions are exact: what the model allows, and what the folder of its weights says."""
    folder = read_architecture(model_folder).language.max_positions if model_folder else None
    return min(filter(None, (architecture.language.max_positions, folder)), default=None)
