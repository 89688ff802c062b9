"""Tiling: the grids of the published rule, and tiles that hold the pixels they should."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.vlm.data.media.tiles import Tiling, tile_image
from megatron.vlm.families.internvl.tiling import internvl_grid
from megatron.vlm.families.media import TILINGS
from omnibal_ext.errors import UserError


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((448, 448), (1, 1)),
        ((448 * 3, 448 * 2), (3, 2)),
        ((800, 1300), (2, 3)),  # .615: 3/5 is nearer than 2/3 but has 15 tiles
        ((500, 500), (1, 1)),  # all squares tie; 2 x 2 would need more than half of its pixels
        ((640, 640), (2, 2)),  # 409,600 > half of 802,816
        ((10_000, 10), (12, 1)),
        ((1, 10_000), (1, 12)),
    ],
)
def test_grids_are_those_of_the_published_rule(size: tuple[int, int], grid: tuple[int, int]) -> None:
    assert internvl_grid(*size, tile_size=448, min_tiles=1, max_tiles=12) == grid


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_anyres_grids_are_those_that_hugging_face_chooses(width: int, height: int) -> None:
    processing = pytest.importorskip("transformers.image_processing_utils")
    resolutions = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]  # of the published models
    rows, columns = processing.select_best_resolution((height, width), resolutions)
    assert TILINGS["anyres"].grid(width, height, 336, 1, 4) == (columns // 336, rows // 336)


@pytest.mark.parametrize("images", [2, 5, 12])
def test_an_image_among_others_has_its_own_grid_in_llava_next(images: int) -> None:
    """As transformers' processor and model have it, which look at sizes alone."""
    tiling = Tiling(tile_size=16, max_tiles=12, rule="anyres")
    assert tile_image("x.png", (40, 40), images, tiling) == tile_image("x.png", (40, 40), 1, tiling)
    assert tile_image("x.png", (40, 40), images, tiling).tiles == 5


@pytest.mark.parametrize("wrong", [{"rule": "spiral"}, {"min_tiles": 0}, {"min_tiles": 5, "max_tiles": 4}])
def test_an_impossible_tiling_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        Tiling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("images", [1, 2, 3, 4, 12, 13, 40])
def test_an_image_among_others_has_its_share_of_tiles_and_one_at_least(images: int) -> None:
    """Of a wide picture: as many tiles in a row as its share allows."""
    share = max(1, 12 // images)
    found = tile_image("a.png", (12 * 448, 448), images, Tiling(max_tiles=12))
    assert (found.columns, found.rows) == (share, 1)
    assert found.tiles == share + (share > 1), "a single tile has no thumbnail"
    assert tile_image("a.png", (12 * 448, 448), images, Tiling(max_tiles=12, thumbnail=False)).tiles == share
    least = tile_image("a.png", (448, 448), images, Tiling(min_tiles=4, max_tiles=12))
    assert least.columns * least.rows == min(4, share), "no more than its share"


def test_rules_replace_each_other_where_a_model_reads_their_tiles_alike() -> None:
    alike = [{"internvl", "internvl_each", "pad", "crop", "fixed", "letterbox"}]
    alike.append({"native", "native_grown", "native_widened"})
    alone = [{rule} for rule in TILINGS if not any(rule in group for group in alike)]
    for group in (*alike, *alone):
        read_as = {TILINGS[rule].read_as for rule in group}
        assert group == {name for name, rule in TILINGS.items() if rule.read_as in read_as}


@pytest.mark.parametrize(("least", "most"), [(147384, 2822400), (384**2, 1536**2), (576 * 14**2, 5120 * 14**2)])
def test_images_of_paddleocr_vl_are_as_large_as_its_processors(least: int, most: int) -> None:
    """Also where limits are no whole patches, and for slips, which are widened first."""
    module = pytest.importorskip("transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl")
    rule, seen = TILINGS["native_widened"], set()
    for width, height in np.random.default_rng(0).integers(1, [600, 500], (3000, 2)).tolist():
        if max(width, height) > 40 * min(width, height):
            continue
        for scale in (1, 7):
            size = width * scale, height * scale
            rows, columns = (side // 14 for side in module.smart_resize(*size[::-1], 28, least, most))
            found = rule.grid(*size, 14, least // 14**2, most // 14**2)
            assert found == (columns, rows), size
            seen.add(found)
    assert len(seen) > 100
