"""Tiling of Idefics 3's images: the longer side becomes that of a square of tiles, each with its own text before it."""

from collections.abc import Mapping
from math import ceil, isqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.modalities.vision.runs import TokenRuns
from omnibal_ext.modalities.vision.tiling import LANCZOS, Grid, Processor, TiledImage, TilingRule

if TYPE_CHECKING:
    from PIL import Image

USUAL, MOST_SIDE = (1456, 364), 4096
"""Processor's default longer side of an image and side of a tile, and longest side, in pixels."""


class Split(TilingRule):
    """Tiles, and behind them a thumbnail of the resized image; each has a run of tokens of its own."""

    name, read_as, side_fields = "split", "tiles with words between", ("max_image_size",)
    per_image, always_thumbnail, resampling = True, True, LANCZOS
    usual: Mapping[str, Any] = {"max-tiles": 16}

    def grid(self, width: int, height: int, tile_size: int, least: int, most: int) -> Grid:
        """Return (columns, rows) of tiles: isqrt(`most`) along the longer side; along the other as many as the aspect
        ratio needs."""
        edge = isqrt(most) * tile_size
        inner_width, inner_height = at_edge(width, height, edge)
        if inner_width >= inner_height:
            inner_height = int(edge / (inner_width / inner_height))
        else:
            inner_width = int(edge * (inner_width / inner_height))
        return ceil(inner_width / tile_size), ceil(inner_height / tile_size)

    def cut(self, image: "Image.Image", plan: TiledImage, tile_size: int) -> NDArray[np.uint8]:
        """Return the tiles and a thumbnail of the image, which is resized by its aspect ratio, then to entire tiles."""
        size = (plan.columns * tile_size, plan.rows * tile_size)
        shaped = self.resize(image, at_edge(*image.size, max(size)))
        return super().cut(self.resize(shaped, size), plan, tile_size)

    def runs(self, image: TiledImage) -> TokenRuns:
        """Return a run of tokens for each tile, and one for the thumbnail."""
        return TokenRuns(image.rows, image.columns, image.thumbnail)

    def limits(self, processor: Processor) -> dict[str, Any]:
        """Return the most tiles, from the longer side in the processor's file. Raises UserError for another tiling."""
        side, fields = processor.model.vision.image_size, processor.fields
        if not fields.get("do_image_splitting", True):
            raise processor.fault(
                "do_image_splitting is False; supported: True. --max-tiles 1 makes one tile of an image"
            )
        if not fields:
            return {}
        edges = (processor.limit("longest_edge"), processor.limit("longest_edge", "max_image_size"))
        edge, tile = (usual if given is None else given for given, usual in zip(edges, USUAL, strict=True))
        if tile != side:
            raise processor.fault(f"max_image_size is not {side}, the side of a tile of the model of config.json")
        if not side <= edge <= MOST_SIDE or edge % side:
            supported = f"multiples of {side}, a tile's, up to {MOST_SIDE}"
            raise processor.fault(f"longest_edge is {edge}; supported: {supported}")
        return {"max-tiles": (edge // side) ** 2}


def at_edge(width: int, height: int, edge: int) -> tuple[int, int]:
    """Return (width, height) scaled so that the longer side is `edge`, the shorter one even, and at least 1."""
    if width >= height:
        shorter = int(edge / (width / height))
        return edge, max(1, shorter + shorter % 2)
    shorter = int(edge * (width / height))
    return max(1, shorter + shorter % 2), edge
