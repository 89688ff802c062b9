"""Tiling of Gemma 3's images: one tile, stretched by bilinear interpolation."""

from omnibal_ext.modalities.vision.tiling import BILINEAR, OneTile


class Gemma(OneTile):
    """One tile, whose tokens attend to each other."""

    name, read_as, needs_image_starts = "gemma", "tiles that see themselves", True
    resampling = BILINEAR
