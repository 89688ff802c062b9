"""Tiling of Gemma 4's images at native resolution, scaled to as many patches as the limit allows."""

from math import floor, sqrt

from omnibal_ext.errors import Rejected
from omnibal_ext.families.towers.tiling import Native, patches
from omnibal_ext.modalities.vision.tiling import Grid


class Gemma4(Native):
    """Patches in squares of 3 x 3, of an image scaled to nearly the limit; pixels are normalised by the model."""

    name, read_as, square = "gemma4", "squares of 3 x 3 patches", 3
    normalizes, usual = False, patches(9, 2520)

    def grid(self, width: int, height: int, tile_size: int, least: int, most: int) -> Grid:
        """Return (columns, rows) of patches of an image scaled to nearly `most`. A side shorter than a square becomes
        one, the other follows the aspect ratio. Raises `Rejected` (too_narrow) if no square is left."""
        side, factor = self.square * tile_size, sqrt(most * tile_size**2 / (height * width))
        rows, columns = floor(factor * height / side), floor(factor * width / side)
        longest = most // self.square**2
        if not rows:
            rows, columns = 1, min(width // height, longest)
        elif not columns:
            rows, columns = min(height // width, longest), 1
        if not rows * columns:
            raise Rejected("too_narrow", f"{width} x {height} pixels become no square of {side} pixels a side")
        return columns * self.square, rows * self.square
