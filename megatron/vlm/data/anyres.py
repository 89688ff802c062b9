"""Which features of an image the language model of LLaVA-1.6 reads, and in what order.

    thumbnail, row by row        tiles joined, the padding cut off, a newline behind every row
    0 1                          4  5  |  8  9  n
    2 3                          6  7  | 10 11  n         (two tiles of 2 x 2 features, nothing to cut)
"""

import numpy as np
from numpy.typing import NDArray

NEWLINE = -1


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
