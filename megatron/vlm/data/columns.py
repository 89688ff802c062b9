"""The columns of a dataset folder; `indexed_columns` reads and writes them, with core's IndexedDataset."""

import numpy as np

COLUMNS: dict[str, type[np.generic]] = {"tokens": np.int32, "loss_mask": np.uint8, "images": np.uint8}
SOUNDS = "sounds"
"""One more column, of bytes, for models that hear."""
REMEDY = "preprocess again with omnibal preprocess"


def columns_of(hears: bool) -> dict[str, type[np.generic]]:
    """Name -> type of the columns of a dataset for models that hear, or do not."""
    return {**COLUMNS, SOUNDS: np.uint8} if hears else COLUMNS
