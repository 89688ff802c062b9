"""Tiling of PaliGemma's images: one tile, before a prompt with bidirectional attention."""

from omnibal_ext.modalities.vision.tiling import OneTile


class Paligemma(OneTile):
    """One stretched tile."""

    name, read_as, prefix_attention = "paligemma", "tiles of a prompt", True
