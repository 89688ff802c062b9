"""PaliGemma's models, a line each: every language model sees images of three sizes."""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.language import LanguageArchitecture, SlidingWindow
from omnibal_ext.families.towers.sizes import SIGLIP

SIDES = (224, 448, 896)
"""Pixels of an image's."""
WORDS = 257216
"""With places, segments and the image's."""


def _gemma(layers: int, hidden_size: int, heads: int, kv_heads: int, ffn_hidden_size: int) -> LanguageArchitecture:
    return LanguageArchitecture(
        layers, hidden_size, heads, kv_heads, ffn_hidden_size, WORDS, rope_theta=1e4, norm_epsilon=1e-6,
        head_size=None if hidden_size == 256 * heads else 256, activation="gelu_tanh", centred_norms=True,
        scaled_words=True, prefix_attention=True,
    )  # fmt: skip


def _gemma2(
    layers: int, hidden_size: int, heads: int, ffn_hidden_size: int, head_size: int = 256, scale: int | None = None
) -> LanguageArchitecture:
    language = _gemma(layers, hidden_size, heads, heads // 2, ffn_hidden_size)
    sliding = SlidingWindow(4096, tuple(range(0, layers, 2)), 1e4)
    return replace(
        language, head_size=head_size, branch_norms=True, query_scale=scale, sliding=sliding, score_cap=50.0,
        logit_cap=30.0,
    )  # fmt: skip


LANGUAGES = {
    "paligemma-3b": _gemma(18, 2048, 8, 1, 16384),
    "paligemma2-3b": _gemma2(26, 2304, 8, 9216),
    "paligemma2-10b": _gemma2(42, 3584, 16, 14336),
    "paligemma2-28b": _gemma2(46, 4608, 32, 36864, head_size=128, scale=144),
}


def _model(name: str, language: LanguageArchitecture, side: int) -> Architecture:
    vision = replace(SIGLIP, layers=27, image_size=side, final_norm=True)
    prompt = PromptFormat("paligemma", 257152, "paligemma", "paligemma")
    kind = "gemma2" if language.sliding else "gemma"
    return Architecture(
        name, vision, language, shuffle=1, projector_norm=False, merger="shuffled", tied=True, prompt=prompt,
        types=("paligemma", kind),
    )  # fmt: skip


PRESETS = {
    f"{name}-{side}": _model(f"{name}-{side}", language, side) for name, language in LANGUAGES.items() for side in SIDES
}
