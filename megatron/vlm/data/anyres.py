"""Which features of an image the language model of LLaVA-1.6 reads, and in what order.

thumbnail, row by row        tiles joined, the padding cut off, a newline behind every row
0 1                          4  5  |  8  9  n
2 3                          6  7  | 10 11  n         (two tiles of 2 x 2 features, nothing to cut)
"""

from collections.abc import Iterable
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.data.tiles import RULES, TiledImage
from omnibal_ext.errors import UserError

NEWLINE = -1


def feature_order(image: TiledImage, rule: str, tokens_per_tile: float) -> NDArray[np.int64]:
    """The features of its own tiles that an image's tokens are, in order: int64 [tokens].

    All of them where tiles stay apart. Raises UserError where tiles are joined and the features of one are no square.
    """
    if not RULES[rule].joins_tiles:
        return np.arange(int(image.tiles * tokens_per_tile))
    tokens_per_tile = int(tokens_per_tile)
    side = isqrt(tokens_per_tile)
    if side * side != tokens_per_tile:
        raise UserError(f"{tokens_per_tile} tokens a tile are no square, and {rule!r} joins tiles side by side")
    if not image.width:
        raise UserError(f"{image.path}: the dataset does not know the image's size; preprocess again")
    return image_sources((image.width, image.height), (image.columns, image.rows), side)


def image_sources(size: tuple[int, int], grid: tuple[int, int], side: int) -> NDArray[np.int64]:
    """Feature numbers of one image, NEWLINE between rows: int64 [tokens].

    `size` is the image's width and height, `grid` its columns and rows of tiles, `side` a tile's features in a row.
    Features are numbered tile by tile, the thumbnail first; an image of one tile has no other.
    """
    (columns, rows), tile = grid, side * side
    thumbnail = np.arange(tile)
    if columns * rows == 1:
        return np.append(thumbnail, NEWLINE)
    tiles = np.arange(tile, tile * (1 + columns * rows)).reshape(rows, columns, side, side)
    joined = tiles.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
    kept = _unpadded(joined, size)
    lines = np.concatenate([kept, np.full((len(kept), 1), NEWLINE)], axis=1)
    return np.concatenate([thumbnail, lines.ravel()])


def _unpadded(joined: NDArray[np.int64], size: tuple[int, int]) -> NDArray[np.int64]:
    """What the image covers of a grid into which it was fitted and centred, as LLaVA rounds it."""
    (width, height), (full_height, full_width) = size, joined.shape
    if width / height > full_width / full_height:
        margin = (full_height - int(round(height * (full_width / width), 7))) // 2
        return joined[margin : full_height - margin]
    margin = (full_width - int(round(width * (full_height / height), 7))) // 2
    return joined[:, margin : full_width - margin]


def joined_orders(images: Iterable[tuple[int, NDArray[np.int64]]]) -> NDArray[np.int64]:
    """One order over the features of several images, each given as their number and its own order."""
    joined, offset = [np.empty(0, dtype=np.int64)], 0
    for features, order in images:
        joined.append(np.where(order == NEWLINE, NEWLINE, order + offset))
        offset += features
    return np.concatenate(joined)
