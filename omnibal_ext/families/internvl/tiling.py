"""Dynamic tiling of InternVL 1.5 (arXiv 2404.16821, section 3.3)."""

from functools import cache, lru_cache
from typing import Any

from omnibal_ext.modalities.vision.tiling import Grid, TilingRule
from omnibal_ext.reading.fields import Fields


class Internvl(TilingRule):
    """The grid of tiles whose aspect ratio is nearest to the image's."""

    name = "internvl"

    def grid(self, width: int, height: int, tile_size: int, least: int, most: int) -> Grid:
        """Return (columns, rows) of the grid nearest to the image's aspect ratio (`internvl_grid`)."""
        return internvl_grid(width, height, tile_size, least, most)

    def own_flags(self, config: Fields) -> dict[str, Any]:
        """Return {flag of preprocessing: value} for limits of tiles in InternVL's own config.json."""
        flags = {"min_dynamic_patch": "min-tiles", "max_dynamic_patch": "max-tiles", "use_thumbnail": "thumbnail"}
        found = {flag: config[field] for field, flag in flags.items() if config.get(field) is not None}
        return found | ({"tiling": "fixed"} if config.get("dynamic_image_size") is False else {})


class InternvlEach(Internvl):
    """InternVL's rule, but limits of tiles are each image's, not a conversation's, as in transformers' processor."""

    name, per_image = "internvl_each", True


@cache
def internvl_grids(min_tiles: int, max_tiles: int) -> tuple[Grid, ...]:
    """Return all grids (columns, rows) of `min_tiles` to `max_tiles` tiles by area, which decides between equals."""
    sides = range(1, max_tiles + 1)
    grids = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    return tuple(sorted(grids, key=lambda grid: grid[0] * grid[1]))


@lru_cache(maxsize=2**16)  # images of a corpus share a few sizes
def internvl_grid(width: int, height: int, tile_size: int, min_tiles: int, max_tiles: int) -> Grid:
    """Return (columns, rows) of the grid whose aspect ratio is nearest to the image's.

    Of equally near ones a larger grid wins if the image has more than half of its pixels.
    """
    aspect, area = width / height, width * height
    best, best_distance = (1, 1), float("inf")
    for columns, rows in internvl_grids(min_tiles, max_tiles):
        distance = abs(aspect - columns / rows)
        wins_tie = distance == best_distance and area > 0.5 * tile_size**2 * columns * rows
        if distance < best_distance or wins_tie:
            best, best_distance = (columns, rows), distance
    return best
