"""Columns of a dataset folder; `indexed_columns` reads and writes them, with core's IndexedDataset."""

from collections.abc import Mapping
from typing import Any

import numpy as np

COLUMNS: dict[str, type[np.generic]] = {"tokens": np.int32, "loss_mask": np.uint8, "media": np.uint8}
OLDER = {"images": np.uint8, "sounds": np.uint8}
"""Columns that older datasets have in place of media: one for the lists of each kind."""
REMEDY = "preprocess again with omnibal preprocess"


def columns_of(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a dataset's columns: tokens, loss_mask, media; in older ones images and sounds for media."""
    if "images.bin" not in manifest["checksums"]:
        return tuple(COLUMNS)
    return ("tokens", "loss_mask", "images", *(["sounds"] if "audio" in manifest else []))


def files_of(columns: tuple[str, ...]) -> frozenset[str]:
    """Return the names of the files that the manifest of a dataset with these columns has checksums of."""
    files = (f"{name}.{kind}" for name in columns for kind in ("bin", "idx"))
    return frozenset({"rejected.jsonl", "sizes.npz", *files})
