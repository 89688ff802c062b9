"""Files of a Hugging Face model folder."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import anything, mapping, record, shown, text
from omnibal_ext.reading.document import read_json
from omnibal_ext.reading.files import is_plain_name
from omnibal_ext.reading.tensors import read_tensor_entries

CONFIG = "config.json"
PROCESSOR, OLD_PROCESSOR = "processor_config.json", "preprocessor_config.json"
"""Settings of a model's processors; the second, which older folders have, of images alone, or of sounds."""
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MOST_FILES = 2**12
"""Most files that an index may name: published models have up to 200."""
AGAIN = "download it again"
ADAPTER = "adapter_config.json"
"""The config of peft's adapters; the adapters' weights lie next to it."""
WITH_ADAPTERS = "omnibal convert --from-hf MODEL --adapters FOLDER reads both"


def find_config(path: Path) -> Path | None:
    """Return `path` itself, its config.json, or that of its folder "huggingface" (of a converted model); None: none."""
    candidates = (path, path / CONFIG, path / "huggingface" / CONFIG)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def config_path(path: Path) -> Path:
    """Return the config.json of a model's folder, as `find_config` does. Raises UserError if there is none."""
    if found := find_config(path):
        return found
    if (path / ADAPTER).exists():
        raise UserError(f"{path}: holds an adapter ({ADAPTER}) and no model; {WITH_ADAPTERS}")
    raise UserError(f"{path}: no {CONFIG} here; give a folder of Hugging Face's or one of omnibal convert")


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of config.json or another JSON file. Raises UserError if it is no JSON object."""
    return read_json(path, mapping(anything), AGAIN)


def image_token_id(config: Mapping[str, Any]) -> Any:
    """Return a config.json's id of the token that stands for an image feature, whatever its type; None: not there."""
    config = config.get("thinker_config", config)
    return config.get("image_token_id", config.get("image_token_index"))


def token_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield all ids of tokens that a config.json names, in inner sections too."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from token_ids(value)
        elif type(value) is int and re.search("_token_(id|index)$", name):
            yield value


def weight_files(folder: Path) -> dict[str, str]:
    """Return {weight name: safetensors file} of a folder; empty without weights.

    A single file comes before an index, which may be an older model's: as in transformers.
    """
    if (folder / SINGLE_FILE).exists():
        return dict.fromkeys(read_tensor_entries(folder / SINGLE_FILE), SINGLE_FILE)
    if not (folder / INDEX).exists():
        return {}
    index = read_json(folder / INDEX, record({"weight_map": mapping(weight_file)}), AGAIN)
    weights: dict[str, str] = index["weight_map"]
    if (files := len({*weights.values()})) > MOST_FILES:
        raise UserError(f"{folder / INDEX}: names {files} files, at most {MOST_FILES} are read; {AGAIN}")
    return weights


def weight_file(where: str, value: Any) -> str:
    """Check and return a safetensors file's name. Raises UserError if it may lead out of the model's folder."""
    name = text(where, value)
    if not is_plain_name(name) or not name.endswith(".safetensors"):
        raise UserError(f"{where} must be the name of a .safetensors file in this folder, got {shown(name)}")
    return name
