"""Tiling of GLM-V's images at native resolution."""

from omnibal_ext.families.towers.tiling import Native, grown, patches
from omnibal_ext.modalities.vision.tiling import SQUARE, Grid


class NativeGrown(Native):
    """Patches of an image, enlarged first, as a whole, if a side is shorter than a square of patches (GLM-4.1V)."""

    name, usual, counts_frames = "native_grown", patches(32, 30000), True

    def grid(self, width: int, height: int, tile_size: int, least: int, most: int) -> Grid:
        """Return `Native.grid` of the image, enlarged until no side is shorter than a square of patches."""
        return super().grid(*grown((width, height), SQUARE * tile_size), tile_size, least, most)
