"""Tiling of PaliGemma's images: one tile, before a prompt with bidirectional attention."""

from omnibal_ext.modalities.vision.tiling import OneTile


class Paligemma(OneTile):
    """One stretched tile; tokens before a sample's answer attend in both directions."""

    name, read_as, prefix_attention = "paligemma", "tiles of a prompt", True
