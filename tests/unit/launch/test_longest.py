"""What is said of the longest sample before anything is measured for it."""

import json
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.launch.longest import MAX_PIXELS, longest_sample
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes


def packed(folder: Path, tiles: list[int], max_tiles: int = 16384) -> PackedIndex:
    sizes = Sizes.from_arrays(np.array(tiles), np.array([10 + count // 4 for count in tiles]))
    sizes.save(folder / "sizes.npz")
    (folder / "manifest.json").write_text(json.dumps({"tiling": {"max_tiles": max_tiles}, "tile_size": 28}))
    options = PackOptions("balanced", 1000, 500, micro_batches=2)
    return build_index(sizes, folder / f"packs-{len(tiles)}", options)[0]


def test_the_longest_sample_is_a_share_of_the_budget_and_a_photo_has_a_remedy(tmp_path: Path) -> None:
    """Tokens are 10 and a fourth of the patches; samples without images count in no median of patches."""
    index = packed(tmp_path, [0, 0, 0, 40, 80, 60, 800])
    said = longest_sample(tmp_path, index, is_native=True, is_limited=False)
    assert "800 patches, 80% of a pack's budget (median 70)" in said
    assert "210 tokens, 42% of a pack's budget (median 20)" in said
    assert f"--max-pixels {MAX_PIXELS} makes large images smaller" in said
    index = packed(tmp_path, [4, 4, 4, 64], max_tiles=64)  # what is offered is less than what the model allows
    assert f"--max-pixels {64 * 28**2 // 4} makes" in longest_sample(tmp_path, index, is_native=True, is_limited=False)


@pytest.mark.parametrize(
    ("tiles", "native", "limited"),
    [
        ([40, 80, 60, 200], True, False), ([40, 80, 60, 800], True, True), ([1, 1, 1, 13], False, False),
        ([0, 0], True, False),
    ],
)  # fmt: skip
def test_no_remedy_where_none_stands_out(tiles: list[int], native: bool, limited: bool, tmp_path: Path) -> None:
    said = longest_sample(tmp_path, packed(tmp_path, tiles), native, limited)
    assert "--max-pixels" not in said
    assert ("patches" in said, " tiles" in said) == (native and any(tiles), not native)
