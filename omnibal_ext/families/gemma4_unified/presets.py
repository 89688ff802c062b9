"""The model of Gemma 4 without towers, whose sizes add up to the number of weights that its card says."""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.vision import NativeResolution, VisionArchitecture
from omnibal_ext.families.gemma4.presets import gemma_4

PATCHES = VisionArchitecture(
    0, 3840, heads=1, ffn_hidden_size=0, patch_size=48, image_size=48, embedding_norms=True, pixels="unit",
    native=NativeResolution(1, 1, axis_positions=1120),
)  # fmt: skip


def _without_tower(like: Architecture) -> Architecture:
    """Its language model behind patches that no ViT sees."""
    assert like.language.sliding is not None
    sliding = replace(like.language.sliding, images_here_alone=False, images_whole=True)
    return replace(
        like, vision=PATCHES, language=replace(like.language, sliding=sliding), shuffle=1, pools=False, merger="normed",
        prompt=PromptFormat("gemma4", 258880, "gemma4", "gemma4_unified"),
        types=("gemma4_unified", "gemma4_unified_text"),
    )  # fmt: skip


PRESETS = {"gemma-4-12b": _without_tower(gemma_4("gemma-4-12b", 48, 3840, 16, 8, 1, 15360))}
