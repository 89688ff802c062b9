"""Tiling of Gemma 3's images: one tile, stretched by bilinear interpolation."""

from omnibal_ext.modalities.vision.tiling import BILINEAR, OneTile


class Gemma(OneTile):
    """One stretched tile, whose tokens attend to each other in the language model."""

    name, read_as, needs_image_starts = "gemma", "tiles that see themselves", True
    resampling = BILINEAR
