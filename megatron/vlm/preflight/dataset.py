"""Checks that a dataset fits the model: tiles, tokenizer, longest sample. Reports all differences at once."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron.vlm.data.manifest import read_rules
from megatron.vlm.preprocessing.model_recipe import is_compatible, model_settings, tokenizer_difference
from megatron.vlm.preprocessing.tokenizer import model_tokenizer
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import CONFIG, image_token_id, read_config
from omnibal_ext.architectures.huggingface import read_architecture
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import sha256_of
from omnibal_ext.modalities.modality import FURTHER
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.sizes import Sizes

Mismatch = tuple[str, str, object]
"""A difference between dataset and model in words, and the flag and value of preprocessing that resolve it."""


def check_dataset(
    folder: Path, manifest: Mapping[str, Any], architecture: Architecture, model_folder: Path | None
) -> str:
    """Return what was compared, for the table of checks; `model_folder` has the weights' config.json and tokenizer.

    Raises UserError with all differences, and the flags that make a fitting dataset.
    """
    told = (manifest, architecture, model_folder)
    unlike = [*_tiling(*told), *_rules(*told), *_token_ids(*told)]
    if unlike:
        flags = shlex.join([str(word) for pair in dict(one[1:] for one in unlike).items() for word in pair])
        raise UserError(
            f"dataset {folder}: not made for {architecture.name!r}: {', '.join(what for what, *_ in unlike)}; "
            f"preprocess again with {flags}"
        )
    file = model_tokenizer(model_folder) if model_folder else None
    compared = f"with {file}" if file else "by its ids only, none lies next to the weights"
    return f"{manifest['samples']} samples fit; tokenizer compared {compared}"


def _tiling(manifest: Mapping[str, Any], architecture: Architecture, model_folder: Path | None) -> Iterator[Mismatch]:
    """Yield differences in tiling and markup of images; not in the chat template, since a model can learn another."""
    made = {
        "tiling": manifest["tiling"]["rule"],
        "tile-size": manifest["tile_size"],
        "tokens-per-tile": manifest["tokens_per_tile"],
        "normalize": manifest["normalization"],
        "image-markup": manifest["image_markup"],
    }
    wanted = model_settings(architecture, model_folder, with_template=False)
    for flag, value in made.items():
        if not is_compatible(flag, value, due := wanted[flag].value):
            yield f"--{flag} {value}, not {due}", f"--{flag}", due


def _rules(manifest: Mapping[str, Any], architecture: Architecture, model_folder: Path | None) -> Iterator[Mismatch]:
    """Yield differences in how the dataset's sounds and separately encoded videos, if any, became encoder inputs."""
    for one, made in read_rules(manifest).items():
        wanted = model_settings(architecture, model_folder, with_template=False).get(one.name)
        if not wanted or wanted.value.decides != made.decides:
            due = wanted.value if wanted else "not at all"
            yield f"{one.inputs} read otherwise, not {due}", "--model", model_folder or architecture.name


def _token_ids(
    manifest: Mapping[str, Any], architecture: Architecture, model_folder: Path | None
) -> Iterator[Mismatch]:
    """Yield differences in token ids: beyond the vocabulary, another image token, another tokenizer."""
    file = model_tokenizer(model_folder) if model_folder else None
    remedy = ("--tokenizer-model", file or "TOKENIZER_OF_THE_MODEL")
    ids = max(manifest["vocab_size"], manifest["image_token_id"] + 1)
    if ids > architecture.language.vocab_size:
        yield f"token ids up to {ids - 1}, the vocabulary ends at {architecture.language.vocab_size}", *remedy
    named = image_token_id(read_config(model_folder / CONFIG)) if model_folder else None
    expected = architecture.prompt.image_token_id if named is None else named
    if expected not in (None, manifest["image_token_id"]):
        yield f"image token {manifest['image_token_id']}, not {expected}", *remedy
    for one in FURTHER:
        made = manifest.get(f"{one.name}_token_id")
        if made not in (None, due := architecture.prompt.further_token_ids.get(one.size, made)):
            yield f"{one.name} token {made}, not {due}", *remedy
    if file and (difference := _tokenizer_difference(manifest, file)):
        yield f"tokenizer {manifest['tokenizer']['path']}, not {file}: {difference}", *remedy


def _tokenizer_difference(manifest: Mapping[str, Any], file: Path) -> str:
    made = manifest["tokenizer"]
    if sha256_of(file) == made["sha256"]:
        return ""
    return tokenizer_difference(manifest["special_tokens"], made["vocabulary"]["sha256"], file)


def check_lengths(index: PackedIndex, sizes: Sizes, limit: int | None) -> str:
    """Return the longest packed sample in words. Raises UserError if it has more tokens than `limit`, the positions."""
    samples = np.unique(index.sample_ids)
    longest = int(samples[np.argmax(sizes.tokens[samples])])
    tokens = int(sizes.tokens[longest])
    if limit is not None and tokens > limit:
        count = int((sizes.tokens[samples] > limit).sum())
        raise UserError(
            f"packs {index.folder}: sample {longest} has {tokens} tokens; {count} in all have more than the "
            f"model's {limit} positions; pack again with --llm-budget {limit} or less, which leaves them out"
        )
    return f"{tokens} tokens, " + (f"the model has {limit} positions" if limit else "rotary positions have no limit")


def longest_positions(architecture: Architecture, model_folder: Path | None, padded: bool = False) -> int | None:
    """Return the most tokens of a sample that the model and its weights' folder allow; None: no limit.

    Dynamic RoPE scaling depends on the sample's length. If only the folder has it, or padding hides the length, the
    limit is where scaling begins.
    """
    language = architecture.language
    models = [language, read_architecture(model_folder).language] if model_folder else [language]
    limits = [model.max_positions for model in models]
    own = {one.rope.scaling for one in language.attentions}
    for scaling in {one.rope.scaling for model in models for one in model.attentions}:
        if scaling and scaling.kind == "dynamic" and (padded or scaling not in own):
            limits.append(scaling.original_positions)
    return min(filter(None, limits), default=None)
