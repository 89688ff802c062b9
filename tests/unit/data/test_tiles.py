"""Tiling: the grids of the published rule, and tiles that hold the pixels they should."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from examples.demo.data import exact_grids
from megatron.vlm.data.media.tiles import Tiling, tile_image
from megatron.vlm.data.media.tiling import TiledImage
from megatron.vlm.families.internvl.tiling import internvl_grid, internvl_grids
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


def test_every_grid_respects_the_tile_limits_and_is_offered_once() -> None:
    grids = internvl_grids(3, 12)
    assert len(grids) == len(set(grids))
    assert set(grids) == {(c, r) for c in range(1, 13) for r in range(1, 13) if 3 <= c * r <= 12}


def test_tiles_are_cut_row_by_row_and_the_thumbnail_comes_last() -> None:
    cells = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    picture = Image.fromarray(cells.repeat(8, axis=0).repeat(8, axis=1)).convert("RGB")
    tiles = TILINGS["internvl"].cut(picture, TiledImage("", columns=3, rows=2, thumbnail=True), tile_size=8)
    assert tiles.shape == (7, 8, 8, 3)
    for number, value in enumerate(cells.reshape(-1)):
        assert (tiles[number] == value).all()
    assert np.abs(tiles[6].mean() - cells.mean()) < 2


@pytest.mark.parametrize("images", [1, 2, 3, 4])
def test_tiling_cuts_a_demo_picture_into_exactly_its_cells(images: int) -> None:
    tiling = Tiling(tile_size=32, max_tiles=32)
    grids = [grid for same_area in exact_grids(32 // images).values() for grid in same_area]
    assert (5, 6) in grids or images > 1
    for columns, rows in grids:
        tiled = tile_image("x.png", (columns * 32, rows * 32), images, tiling)
        assert (tiled.columns, tiled.rows) == (columns, rows)


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


def test_anyres_keeps_the_aspect_ratio_and_puts_the_thumbnail_first() -> None:
    white = Image.new("RGB", (100, 20), (255, 255, 255))
    tiling = Tiling(tile_size=16, rule="anyres")
    tiled = tile_image("x.png", white.size, 1, tiling)
    assert (tiled.columns, tiled.rows, tiled.tiles) == (3, 1, 4)
    thumbnail, *tiles = TILINGS["anyres"].cut(white, tiled, 16)
    assert (thumbnail == 255).all()
    assert [tile[8].min() for tile in tiles] == [255] * 3  # the middle line is image from end to end
    assert max(tile[[0, 1, 2, 13, 14, 15]].max() for tile in tiles) == 0  # above and below is black


def test_fixed_is_one_tile_whatever_the_size() -> None:
    assert tile_image("x.png", (4000, 100), 1, Tiling(rule="fixed")).tiles == 1


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
    alike = [{"internvl", "internvl_each", "pad", "crop", "fixed", "letterbox"}, {"native", "native_grown"}]
    alone = [{rule} for rule in TILINGS if not any(rule in group for group in alike)]
    for group in (*alike, *alone):
        read_as = {TILINGS[rule].read_as for rule in group}
        assert group == {name for name, rule in TILINGS.items() if rule.read_as in read_as}
