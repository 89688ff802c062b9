"""Data types of exported weights, and the `dtype` of their config.json."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.vlm.checkpoint.folder import RELEASE
from megatron.vlm.hf.checkpoint import OurCheckpoint
from megatron.vlm.hf.folder import DTYPE_NAMES, DTYPES, Stored
from megatron.vlm.hf.names import WeightSource
from omnibal_ext.architectures.folder import CONFIG, read_config
from omnibal_ext.files.records import write_text

FIELDS = ("dtype", "torch_dtype")
"""Fields of config.json and its sections that name a data type, as transformers 5 and 4 write them."""


def export_types(
    stored: Mapping[str, Stored], ours: OurCheckpoint, sources: Mapping[str, WeightSource], joined: Mapping[str, Any]
) -> dict[str, Stored]:
    """Return `stored` (Hugging Face's weights) with the data types of our checkpoint.

    Untrained weights keep the original types: one of ours may be joined from several types, as the widest (`joined`).
    """
    untouched, found = ours.folder.name == RELEASE and not ours.adapters, dict(stored)
    for name, source in sources.items():
        dtype = ours.weights[name].properties.dtype
        if not (untouched and dtype == joined[name].dtype):
            found |= {theirs: replace(stored[theirs], dtype=DTYPE_NAMES[dtype]) for theirs in source.theirs}
    return found


def write_config_dtype(folder: Path, stored: Mapping[str, Stored]) -> None:
    """Set `dtype` in a folder's config.json, wherever it stands or at the top, to the type of most parameters."""
    counts: Counter[str] = Counter()
    for entry in stored.values():
        if DTYPES[entry.dtype].is_floating_point:
            counts[entry.dtype] += entry.bytes // DTYPES[entry.dtype].itemsize
    name = str(DTYPES[counts.most_common(1)[0][0]]).removeprefix("torch.")
    before = read_config(folder / CONFIG)
    config = _with_dtype(name, before)
    if not any(isinstance(config.get(field), str) for field in FIELDS):
        config[FIELDS[0]] = name
    if config != before:
        write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")


def _with_dtype(name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    said = {field: name for field in FIELDS if isinstance(section.get(field), str)}
    return {
        key: _with_dtype(name, value) if isinstance(value, dict) else value for key, value in section.items()
    } | said
