"""Tiling: the grids of the published rule, and tiles that hold the pixels they should."""

import numpy as np
import pytest
from PIL import Image

from megatron.vlm.data.demo import exact_grids
from megatron.vlm.data.tiles import Tiling, cut_tiles, internvl_grid, internvl_grids, tile_image


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


def test_a_conversation_shares_its_tiles_among_its_images() -> None:
    tiling = Tiling(tile_size=448, max_tiles=12)
    alone = tile_image("a.png", (4480, 3360), images=1, tiling=tiling)
    one_of_four = tile_image("a.png", (4480, 3360), images=4, tiling=tiling)
    assert (alone.columns, alone.rows, alone.tiles) == (4, 3, 13)
    assert one_of_four.columns * one_of_four.rows <= 3


def test_a_single_tile_has_no_thumbnail() -> None:
    assert tile_image("a.png", (448, 448), images=1, tiling=Tiling()).tiles == 1
    assert tile_image("a.png", (896, 448), images=1, tiling=Tiling()).tiles == 3
    assert tile_image("a.png", (896, 448), images=1, tiling=Tiling(thumbnail=False)).tiles == 2


def test_tiles_are_cut_row_by_row_and_the_thumbnail_comes_last() -> None:
    cells = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    picture = Image.fromarray(cells.repeat(8, axis=0).repeat(8, axis=1)).convert("RGB")
    tiles = cut_tiles(picture, columns=3, rows=2, thumbnail=True, tile_size=8)
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
