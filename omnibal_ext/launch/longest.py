"""A note on the longest sample, which determines the budgets at which layers are measured."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.modalities.modality import FURTHER, FURTHER_SIZES
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.reading.checks import integer, record
from omnibal_ext.reading.document import read_json
from omnibal_ext.sizes import Sizes

OUTLIER = 4
"""The longest sample is an outlier if it is at least so many times the median (of samples with images)."""
MAX_PIXELS = 1280 * 28**2
"""The usual --max-pixels of other trainers for models with native resolution."""

_SIZE = integer(1, 2**31)
TILES = record({"tile_size": _SIZE, "tiling": record({"max_tiles": _SIZE})})
"""What is used of a dataset's manifest."""


def longest_sample(data: Path, index: PackedIndex, is_native: bool, is_limited: bool) -> str:
    """Return a sentence on the most tiles and tokens of a sample in the packs, compared with the budgets.

    It suggests --max-pixels for an outlier of a model with native resolution (`is_native`), unless flags limit images
    already (`is_limited`).
    """
    packed = Sizes.load(data / "sizes.npz", FURTHER_SIZES).take(np.unique(index.sample_ids))
    tiles, unit = packed.tiles[packed.tiles > 0], "patches" if is_native else "tiles"
    shares = [_share("tokens", packed.tokens, index.llm_budget)]
    if len(tiles):
        shares.insert(0, _share(unit, tiles, index.vit_budget))
    for one in (one for one in FURTHER if one.size in index.budgets):
        units = packed.more[one.size]
        shares.append(_share(one.units, units[units > 0], index.budgets[one.size]))
    said = f"longest samples: {' and '.join(shares)}"
    if not is_native or is_limited or not len(tiles) or tiles.max() <= OUTLIER * np.median(tiles):
        return said
    manifest = read_json(data / "manifest.json", TILES, "preprocess again with omnibal preprocess")
    smaller = min(MAX_PIXELS, manifest["tiling"]["max_tiles"] * manifest["tile_size"] ** 2 // OUTLIER)
    return f"{said}; costs and memory are planned for these: --max-pixels {smaller} makes large images smaller"


def _share(unit: str, sizes: NDArray[Any], budget: int) -> str:
    most = int(sizes.max())
    share = f"{most / budget:.0%} of" if budget else "with no"
    return f"{most:,} {unit}, {share} a pack's budget (median {np.median(sizes):,.0f})"
