"""From an image's size to a grid of tiles, and from the image to its tiles.

    1800 x 900 image, at most 6 tiles: grid 2 x 1            tiles, in the order the model sees them:
    +---------+---------+                                    +---+ +---+ +-----------+
    |    0    |    1    |   resized to (2 T) x (1 T) pixels   | 0 | | 1 | | thumbnail |
    +---------+---------+                                    +---+ +---+ +-----------+

The rule is InternVL's dynamic tiling (InternVL 1.5, arXiv 2404.16821, section 3.3, as its released code has it).
"""

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Grid = tuple[int, int]  # columns, rows


@dataclass(frozen=True, slots=True)
class Tiling:
    """How images are cut: `tile_size` in pixels, tile counts without the thumbnail.

    `max_tiles` is for one conversation: its images share it equally, as in InternVL's multi-image training.
    """

    tile_size: int = 448
    min_tiles: int = 1
    max_tiles: int = 12
    thumbnail: bool = True
    rule: str = "internvl"

    def to_json(self) -> dict[str, Any]:
        """What the dataset's manifest keeps of it."""
        return {"rule": self.rule, **{key: value for key, value in asdict(self).items() if key != "rule"}}


@dataclass(frozen=True, slots=True)
class TiledImage:
    """One image of a sample: its path relative to the image root, its grid, and whether a thumbnail follows."""

    path: str
    columns: int
    rows: int
    thumbnail: bool

    @property
    def tiles(self) -> int:
        """ViT tiles that the image becomes."""
        return self.columns * self.rows + self.thumbnail


@cache
def internvl_grids(min_tiles: int, max_tiles: int) -> tuple[Grid, ...]:
    """All grids of `min_tiles` to `max_tiles` tiles, smaller areas first: the order in which ties are settled."""
    sides = range(1, max_tiles + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


def internvl_grid(width: int, height: int, tile_size: int, min_tiles: int, max_tiles: int) -> Grid:
    """The grid whose aspect ratio is nearest to the image's.

    Of equally near ones the later, larger grid wins if the image has more than half of that grid's pixels.
    """
    aspect, area = width / height, width * height
    best, best_distance = (1, 1), float("inf")
    for columns, rows in internvl_grids(min_tiles, max_tiles):
        distance = abs(aspect - columns / rows)
        wins_tie = distance == best_distance and area > 0.5 * tile_size**2 * columns * rows
        if distance < best_distance or wins_tie:
            best, best_distance = (columns, rows), distance
    return best


def tile_image(path: str, size: tuple[int, int], images: int, tiling: Tiling) -> TiledImage:
    """Decide the grid of an image of `size` (width, height) pixels, one of `images` in its conversation."""
    share = max(1, tiling.max_tiles // images)
    columns, rows = internvl_grid(*size, tiling.tile_size, min(tiling.min_tiles, share), share)
    return TiledImage(path, columns, rows, tiling.thumbnail and columns * rows > 1)


def cut_tiles(image: Image.Image, columns: int, rows: int, thumbnail: bool, tile_size: int) -> NDArray[np.uint8]:
    """Resize (bicubic) and cut an RGB image by rows: uint8 [columns * rows + thumbnail, tile_size, tile_size, 3]."""
    resized = np.asarray(image.resize((columns * tile_size, rows * tile_size), Image.Resampling.BICUBIC))
    cells = resized.reshape(rows, tile_size, columns, tile_size, 3).swapaxes(1, 2)
    tiles = cells.reshape(-1, tile_size, tile_size, 3)
    if not thumbnail:
        return tiles
    small = np.asarray(image.resize((tile_size, tile_size), Image.Resampling.BICUBIC))
    return np.concatenate([tiles, small[None]])
