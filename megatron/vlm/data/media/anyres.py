"""The order of an image's features in the text, for tiles that are joined (LLaVA-1.6, LLaVA-OneVision).

thumbnail, row by row        tiles joined, the padding cut off, a newline after every row
0 1                          4  5  |  8  9  n
2 3                          6  7  | 10 11  n         (two tiles of 2 x 2 features, nothing to cut)

LLaVA-OneVision downsamples joined tiles of more than nine tiles' features (bilinear interpolation): a token is then a
weighted mean of four features. An image among several is one tile and a newline.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isqrt, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.vlm.data.media.tiles import RULES, TiledImage
from omnibal_ext.errors import UserError

NEWLINE = -1
TOLERATED = 1.1
"""Sides may exceed the cap by this factor before downsampling (LLaVA-OneVision)."""


@dataclass(frozen=True)
class FeatureOrder:
    """The feature, or weighted features, of each image token."""

    sources: NDArray[np.int64]
    """Feature numbers [tokens], or [tokens, 4] if tokens are weighted means."""
    weights: NDArray[np.float32] | None = None
    """[tokens, 4]; None: every token is one feature."""

    def __len__(self) -> int:
        return len(self.sources)

    def as_means(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Sources and weights as [tokens, 4] in any case."""
        if self.weights is not None:
            return self.sources, self.weights
        weights = np.zeros((len(self), 4), np.float32)
        weights[:, 0] = 1.0
        return np.repeat(self.sources[:, None], 4, axis=1), weights


def feature_order(image: TiledImage, rule: str, tokens_per_tile: float) -> FeatureOrder:
    """The order of an image's features; 0, 1, 2, ... if the rule does not join tiles.

    Raises UserError if it does, and a tile's features are no square or the image's size is not recorded.
    """
    if not RULES[rule].joins_tiles:
        return FeatureOrder(np.arange(int(image.tiles * tokens_per_tile)))
    tokens_per_tile = int(tokens_per_tile)
    side = isqrt(tokens_per_tile)
    if side * side != tokens_per_tile:
        raise UserError(f"{tokens_per_tile} tokens a tile are no square, and {rule!r} joins tiles side by side")
    if not image.width:
        raise UserError(f"{image.path}: the dataset does not know the image's size; preprocess again")
    size, grid = (image.width, image.height), (image.columns, image.rows)
    if RULES[rule].cap and image.thumbnail:
        return _capped(size, grid, side, RULES[rule].cap)
    return FeatureOrder(image_sources(size, grid, side))


def image_sources(size: tuple[int, int], grid: tuple[int, int], side: int) -> NDArray[np.int64]:
    """Feature numbers of one image, with NEWLINE: int64 [tokens].

    `size`: (width, height) in pixels. `grid`: (columns, rows) of tiles. `side`: features in a tile's row. Features are
    numbered tile by tile from the thumbnail on; an image of one tile has the thumbnail only.
    """
    (columns, rows), tile = grid, side * side
    thumbnail = np.arange(tile)
    if columns * rows == 1:
        return np.append(thumbnail, NEWLINE)
    return np.concatenate([thumbnail, _lines(_joined(size, grid, side)).ravel()])


def _joined(size: tuple[int, int], grid: tuple[int, int], side: int) -> NDArray[np.int64]:
    """Feature numbers of the joined tiles, without padding: [rows, columns]."""
    (columns, rows), tile = grid, side * side
    tiles = np.arange(tile, tile * (1 + columns * rows)).reshape(rows, columns, side, side)
    return _unpadded(tiles.transpose(0, 2, 1, 3).reshape(rows * side, columns * side), size)


def _lines(kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """[rows, columns, ...] -> [rows, columns + 1, ...] with NEWLINE at the end of every row."""
    return np.concatenate([kept, np.full((len(kept), 1, *kept.shape[2:]), NEWLINE)], axis=1)


def _capped(size: tuple[int, int], grid: tuple[int, int], side: int, cap: int) -> FeatureOrder:
    """Thumbnail and joined tiles, downsampled if they have many more features than `cap` tiles."""
    kept, thumbnail = _joined(size, grid, side), np.arange(side * side)
    (height, width), longer = kept.shape, sqrt(kept.size / (cap * side * side))
    if longer <= TOLERATED:
        return FeatureOrder(np.concatenate([thumbnail, _lines(kept).ravel()]))
    rows, row_shares = _between(height, int(height // longer))
    columns, column_shares = _between(width, int(width // longer))
    around = [(row, column) for row in (0, 1) for column in (0, 1)]
    sources = np.stack([kept[rows[i]][:, columns[j]] for i, j in around], axis=-1)
    shares = np.stack([np.outer(row_shares[i], column_shares[j]) for i, j in around], axis=-1)
    ends = np.zeros((len(shares), 1, 4), np.float32)
    ends[..., 0] = 1.0
    first, first_weights = FeatureOrder(thumbnail).as_means()
    weights = np.concatenate([shares, ends], axis=1).reshape(-1, 4)
    return FeatureOrder(
        np.concatenate([first, _lines(sources).reshape(-1, 4)]),
        np.concatenate([first_weights, weights]).astype(np.float32),
    )


def _between(length: int, shorter: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Linear interpolation of `length` values to `shorter`: two indices for each, and their weights, [2, shorter]."""
    ratio = np.float32(length) / np.float32(shorter)
    # Rounded once, as torch's fused multiplication does.
    at = np.maximum(float(ratio) * (np.arange(shorter) + 0.5) - 0.5, 0).astype(np.float32)
    low = at.astype(np.int64)
    rest = at - low
    return np.stack([low, np.minimum(low + 1, length - 1)]), np.stack([1 - rest, rest]).astype(np.float32)


def _unpadded(joined: NDArray[np.int64], size: tuple[int, int]) -> NDArray[np.int64]:
    """Cut off the padding of an image that was fitted into the grid and centred, with LLaVA's rounding."""
    (width, height), (full_height, full_width) = size, joined.shape
    if width / height > full_width / full_height:
        margin = (full_height - int(round(height * (full_width / width), 7))) // 2
        return joined[margin : full_height - margin]
    margin = (full_width - int(round(width * (full_height / height), 7))) // 2
    return joined[:, margin : full_width - margin]


def joined_orders(images: Iterable[tuple[int, FeatureOrder]]) -> FeatureOrder:
    """One order for several images, given as (number of features, order) each."""
    moved, offset = [FeatureOrder(np.empty(0, dtype=np.int64))], 0
    for features, order in images:
        moved.append(replace(order, sources=np.where(order.sources == NEWLINE, NEWLINE, order.sources + offset)))
        offset += features
    if all(order.weights is None for order in moved):
        return FeatureOrder(np.concatenate([order.sources for order in moved]))
    sources, weights = zip(*(order.as_means() for order in moved), strict=True)
    return FeatureOrder(np.concatenate(sources), np.concatenate(weights))


def order_tensors(images: Iterable[tuple[int, FeatureOrder]]) -> dict[str, Any]:
    """`joined_orders` as fields of a `Microbatch`."""
    order = joined_orders(images)
    found: dict[str, Any] = {"image_sources": torch.from_numpy(order.sources)}
    return found if order.weights is None else found | {"image_weights": torch.from_numpy(order.weights)}
