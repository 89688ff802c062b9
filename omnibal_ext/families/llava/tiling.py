"""Tiling of LLaVA's images: one square (1.5), or tiles that are joined (1.6, OneVision), and their features' order.

thumbnail, row by row        tiles joined, the padding cut off, a newline after every row
0 1                          4  5  |  8  9  n
2 3                          6  7  | 10 11  n         (two tiles of 2 x 2 features, nothing to cut)

LLaVA-OneVision downsamples joined tiles of more than nine tiles' features (bilinear interpolation): a token is then a
weighted mean of four features. An image among several is one tile and a newline.
"""

from collections.abc import Mapping
from math import ceil, isqrt, sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.modalities.vision.features import NEWLINE, FeatureOrder
from omnibal_ext.modalities.vision.tiling import Grid, OneTile, Processor, TiledImage, TilingRule

if TYPE_CHECKING:
    from PIL import Image

MAX_CANVAS = 2**28  # pixels, 0.8 GB
CLIP_GROUND, SIGLIP_GROUND = (122, 116, 104), (127, 127, 127)  # the mean of their pixels, of 255
USUAL_SIDE = 224
"""Default side of LLaVA-1.5's processor, in pixels."""
CAP, TOLERATED = 9, 1.1
"""LLaVA-OneVision's limit: features of so many tiles, which sides of joined tiles may exceed by this factor."""


class Fixed(OneTile):
    """One tile, to which the image is stretched (LLaVA-Interleave)."""

    name = "fixed"

    def limits(self, processor: Processor) -> dict[str, Any]:
        """Return limits and, where the folder has a processor, the rule by which that makes a square, as flags."""
        return super().limits(processor) | ({"tiling": square_rule(processor)} if processor.fields else {})


class Pad(Fixed):
    """One tile of the image, padded to a square with the mean colour of the ViT's pixels (LLaVA-1.5 as trained)."""

    name, ground = "pad", CLIP_GROUND

    def grid(self, width: int, height: int, tile_size: int, least: int, most: int) -> Grid:
        """Return (1, 1). Raises `Rejected` (too_many_pixels) if the padded image would be too large."""
        return within(max(width, height) ** 2, f"{width} x {height} pixels, padded to a square")

    def resize(self, image: "Image.Image", size: tuple[int, int]) -> "Image.Image":
        """Return the image padded to a square, then scaled to `size`."""
        from PIL import Image  # at first use: deciding needs none

        side = max(image.size)
        square = Image.new("RGB", (side, side), self.ground)
        square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        return super().resize(square, size)


class GreyPad(Pad):
    """`Pad` with grey: for each of several images of a conversation (LLaVA-OneVision)."""

    ground = SIGLIP_GROUND


class Crop(OneTile):
    """One tile of the image's centre square (LLaVA-1.5's published processor)."""

    name = "crop"

    def grid(self, width: int, height: int, tile_size: int, least: int, most: int) -> Grid:
        """Return (1, 1). Raises `Rejected` (too_many_pixels) if the image scaled to be cut would be too large."""
        pixels = tile_size**2 * max(width, height) // min(width, height)
        return within(pixels, f"{width} x {height} pixels, scaled to be cut")

    def resize(self, image: "Image.Image", size: tuple[int, int]) -> "Image.Image":
        """Return the image with its shorter side scaled to `size`, and its longer one cut."""
        (width, height), short = size, min(image.size)
        scaled = super().resize(image, (int(width * image.width / short), int(height * image.height / short)))
        left, top = (scaled.width - width) // 2, (scaled.height - height) // 2
        return scaled.crop((left, top, left + width, top + height))


class AnyRes(TilingRule):
    """Tiles in one of a few grids, padded with black, a thumbnail first; features are joined (LLaVA-1.6)."""

    name, read_as, per_image, always_thumbnail = "anyres", "joined tiles", True, True
    # Small images fit several equally well; the first one wins. The order is transformers', which reads the published
    # list as (height, width).
    grids: tuple[Grid, ...] = ((2, 1), (1, 2), (2, 2), (1, 3), (3, 1))

    def grid(self, width: int, height: int, tile_size: int, least: int, most: int) -> Grid:
        """Return the one of `grids` that keeps most of the image's pixels, and of such the one with least padding."""

        def merit(grid: Grid) -> tuple[int, int]:
            full_width, full_height = grid[0] * tile_size, grid[1] * tile_size
            scale = min(full_width / width, full_height / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - full_width * full_height

        allowed = [grid for grid in self.grids if least <= grid[0] * grid[1] <= most]
        return max(allowed, key=merit, default=(1, 1))

    def resize(self, image: "Image.Image", size: tuple[int, int]) -> "Image.Image":
        """Return the image scaled into `size` (the grid's pixels), at its centre, on black."""
        from PIL import Image  # at first use: deciding needs none

        (width, height), (full_width, full_height) = image.size, size
        if full_width / width < full_height / height:
            inner = (full_width, min(ceil(height * full_width / width), full_height))
        else:
            inner = (min(ceil(width * full_height / height), full_width), full_height)
        ground = Image.new("RGB", size)
        ground.paste(super().resize(image, inner), ((full_width - inner[0]) // 2, (full_height - inner[1]) // 2))
        return ground

    def cut(self, image: "Image.Image", plan: TiledImage, tile_size: int) -> NDArray[np.uint8]:
        """Return the thumbnail and the tiles: uint8 [plan.tiles, tile_size, tile_size, 3]."""
        return np.roll(super().cut(image, plan, tile_size), int(plan.thumbnail), axis=0)

    def order(self, image: TiledImage, tokens_per_tile: float) -> FeatureOrder:
        """Return which feature each token is. Raises UserError without the image's size, or if tiles are no squares."""
        side = isqrt(int(tokens_per_tile))
        if side * side != int(tokens_per_tile):
            raise UserError(
                f"{int(tokens_per_tile)} tokens a tile are no square, and {self.name!r} joins tiles side by side"
            )
        if not image.width:
            raise UserError(f"{image.path}: the dataset does not know the image's size; preprocess again")
        return self.joined((image.width, image.height), (image.columns, image.rows), side, image.thumbnail)

    def joined(self, size: tuple[int, int], grid: Grid, side: int, thumbnail: bool) -> FeatureOrder:
        """Return which feature each token of an image of `size` pixels is; tiles have `side` x `side` features."""
        return FeatureOrder(image_sources(size, grid, side))


class AnyResMax9(AnyRes):
    """Joined tiles of grids up to 6 x 6; many are downsampled (LLaVA-OneVision)."""

    name, read_as, per_image = "anyres_max_9", "joined tiles, downsampled", False
    grids = tuple((columns, rows) for rows in range(1, 7) for columns in range(1, 7))
    usual: Mapping[str, Any] = {"max-tiles": 36}
    among_several = GreyPad()

    def layout(self, size: tuple[int, int], images: int, tile_size: int, least: int, most: int) -> tuple[Grid, bool]:
        """Return the grid, and whether there is a thumbnail: always, but not for an image among several."""
        rule = self.among_several if images > 1 else self
        return rule.grid(*size, tile_size, least, most), images == 1

    def cut(self, image: "Image.Image", plan: TiledImage, tile_size: int) -> NDArray[np.uint8]:
        """Return thumbnail and tiles; an image without a thumbnail is one among several: one tile, padded grey."""
        return super().cut(image, plan, tile_size) if plan.thumbnail else self.among_several.cut(image, plan, tile_size)

    def joined(self, size: tuple[int, int], grid: Grid, side: int, thumbnail: bool) -> FeatureOrder:
        """Return which features each token is; joined tiles are downsampled if they have many more than `CAP` tiles."""
        if not thumbnail:
            return super().joined(size, grid, side, thumbnail)
        kept, first = _joined(size, grid, side), np.arange(side * side)
        longer = sqrt(kept.size / (CAP * side * side))
        if longer <= TOLERATED:
            return FeatureOrder(np.concatenate([first, _lines(kept).ravel()]))
        return _downsampled(kept, longer, FeatureOrder(first))


def square_rule(processor: Processor) -> str:
    """Return the rule, "pad", "crop" or "fixed", by which a LLaVA model's processor makes a square, with its defaults.

    CLIP's (LLaVA-1.5) pads if `do_pad`, else crops; SigLIP's stretches. Raises UserError if it makes no square of the
    model's size.
    """
    fields, side = processor.fields, processor.model.vision.image_size
    size, stretches = fields.get("size"), str(fields.get("image_processor_type")).startswith("Siglip")
    named = isinstance(size, Mapping) and "height" in size
    cut, pad = bool(fields.get("do_center_crop", not stretches)), bool(fields.get("do_pad"))
    if stretches and (cut or pad or not (named or size is None)):
        raise processor.fault("SigLIP's images are stretched to a size of height and width; no other way is known")
    if not (stretches or cut or pad or named):
        raise processor.fault("do_center_crop is False; supported: True, without which images are no squares")
    for name in ("size", "crop_size") if cut else ("size",):
        if fields.get(name) is None and side != USUAL_SIDE:
            means = f"which means {USUAL_SIDE} pixels; the model of config.json sees {side}"
            raise processor.fault(f"{name} is missing, {means}")
    return "pad" if pad else "fixed" if named or stretches else "crop"


def within(pixels: int, what: str) -> Grid:
    """Return (1, 1), the grid of one tile. Raises `Rejected` (too_many_pixels) if `what` has over `MAX_CANVAS`."""
    if pixels > MAX_CANVAS:
        raise Rejected("too_many_pixels", f"{what}, are {pixels}, limit {MAX_CANVAS}; cut it into parts")
    return (1, 1)


def image_sources(size: tuple[int, int], grid: Grid, side: int) -> NDArray[np.int64]:
    """Return the number of the feature that each token of an image is, or NEWLINE: int64 [tokens].

    `size`: (width, height) in pixels. `grid`: (columns, rows) of tiles. `side`: features in a tile's row. Features are
    numbered tile by tile from the thumbnail on; an image of one tile has the thumbnail only.
    """
    thumbnail = np.arange(side * side)
    if grid == (1, 1):
        return np.append(thumbnail, NEWLINE)
    return np.concatenate([thumbnail, _lines(_joined(size, grid, side)).ravel()])


def _joined(size: tuple[int, int], grid: Grid, side: int) -> NDArray[np.int64]:
    """Return the numbers of the joined tiles' features, as they lie in the image, without padding: [rows, columns]."""
    (columns, rows), tile = grid, side * side
    tiles = np.arange(tile, tile * (1 + columns * rows)).reshape(rows, columns, side, side)
    return _unpadded(tiles.transpose(0, 2, 1, 3).reshape(rows * side, columns * side), size)


def _lines(kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return feature numbers with NEWLINE behind each row: [rows, columns, ...] -> [rows, columns + 1, ...]."""
    return np.concatenate([kept, np.full((len(kept), 1, *kept.shape[2:]), NEWLINE)], axis=1)


def _downsampled(kept: NDArray[np.int64], longer: float, first: FeatureOrder) -> FeatureOrder:
    """Return `first`, then the joined tiles' features (`kept`) interpolated to sides `longer` times as short."""
    height, width = kept.shape
    rows, row_shares = _between(height, int(height // longer))
    columns, column_shares = _between(width, int(width // longer))
    around = [(row, column) for row in (0, 1) for column in (0, 1)]
    sources = np.stack([kept[rows[i]][:, columns[j]] for i, j in around], axis=-1)
    shares = np.stack([np.outer(row_shares[i], column_shares[j]) for i, j in around], axis=-1)
    ends = np.zeros((len(shares), 1, 4), np.float32)
    ends[..., 0] = 1.0
    first_sources, first_weights = first.as_means()
    weights = np.concatenate([shares, ends], axis=1).reshape(-1, 4)
    return FeatureOrder(
        np.concatenate([first_sources, _lines(sources).reshape(-1, 4)]),
        np.concatenate([first_weights, weights]).astype(np.float32),
    )


def _between(length: int, shorter: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return how to interpolate `length` values to `shorter`: two indices of each, and their weights, [2, shorter]."""
    ratio = np.float32(length) / np.float32(shorter)
    # Rounded once, as torch's fused multiplication does.
    at = np.maximum(float(ratio) * (np.arange(shorter) + 0.5) - 0.5, 0).astype(np.float32)
    low = at.astype(np.int64)
    rest = at - low
    return np.stack([low, np.minimum(low + 1, length - 1)]), np.stack([1 - rest, rest]).astype(np.float32)


def _unpadded(joined: NDArray[np.int64], size: tuple[int, int]) -> NDArray[np.int64]:
    """Cut off the features of padding: the image was fitted into the grid and centred, with LLaVA's rounding."""
    (width, height), (full_height, full_width) = size, joined.shape
    if width / height > full_width / full_height:
        margin = (full_height - int(round(height * (full_width / width), 7))) // 2
        return joined[margin : full_height - margin]
    margin = (full_width - int(round(width * (full_height / height), 7))) // 2
    return joined[:, margin : full_width - margin]
