"""PaliGemma's images: one tile, in front of a prompt that sees all of itself."""

from megatron.vlm.data.media.tiling import OneTile


class Paligemma(OneTile):
    """One stretched tile."""

    name, read_as, prefix_attention = "paligemma", "tiles of a prompt", True
