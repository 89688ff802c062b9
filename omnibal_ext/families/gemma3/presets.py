"""Gemma 3's models, a line each."""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.language import LanguageArchitecture, RopeScaling, SlidingWindow
from omnibal_ext.families.towers.sizes import SIGLIP


def _gemma(
    name: str, layers: int, hidden_size: int, heads: int, ffn_hidden_size: int, head_size: int, query_scale: int | None
) -> Architecture:
    near = tuple(layer for layer in range(layers) if (layer + 1) % 6)
    language = LanguageArchitecture(
        layers, hidden_size, heads, heads // 2, ffn_hidden_size, vocab_size=262208, norm_epsilon=1e-6, qk_norm=True,
        head_size=head_size, rope_scaling=RopeScaling("linear", 8.0), activation="gelu_tanh", centred_norms=True,
        branch_norms=True, scaled_words=True, query_scale=query_scale, sliding=SlidingWindow(1024, near, 1e4),
        image_attention=True,
    )  # fmt: skip
    vision = replace(SIGLIP, layers=27, image_size=896, final_norm=True)
    prompt = PromptFormat("gemma", 262144, "gemma", "gemma")
    return Architecture(
        name, vision, language, shuffle=4, pools=True, tied=True, prompt=prompt, types=("gemma3", "gemma3_text")
    )


GEMMA: dict[str, tuple[int, int, int, int, int, int | None]] = {
    "gemma-3-4b": (34, 2560, 8, 10240, 256, None),
    "gemma-3-12b": (48, 3840, 16, 15360, 256, None),
    "gemma-3-27b": (62, 5376, 32, 21504, 128, 168),
}
"""Name: layers, width, heads, width of a perceptron, width of a head, by the root of what scores are divided."""
PRESETS = {name: _gemma(name, *parts) for name, parts in GEMMA.items()}
