"""Presets of PaliGemma's models, a line each: every language model sees images of three sizes."""

from typing import Any

from omnibal_ext.families.family import Preset
from omnibal_ext.families.fields import text
from omnibal_ext.families.towers.sizes import SIGLIP

SIDES = (224, 448, 896)
"""Image sizes in pixels."""


def _text(kind: str, *sizes: int, **more: Any) -> dict[str, Any]:
    """Return a language model's config.json with 257216 words: location, segmentation and image tokens included."""
    return text(*sizes, 257216, model_type=kind, **more)


LANGUAGES = {
    "paligemma-3b": _text("gemma", 18, 2048, 8, 1, 16384),
    "paligemma2-3b": _text("gemma2", 26, 2304, 8, 4, 9216),
    "paligemma2-10b": _text("gemma2", 42, 3584, 16, 8, 14336),
    "paligemma2-28b": _text("gemma2", 46, 4608, 32, 16, 36864, head_dim=128, query_pre_attn_scalar=144),
}


def _model(language: dict[str, Any], side: int) -> Preset:
    config = {"model_type": "paligemma", "projection_dim": language["hidden_size"], "image_token_index": 257152}
    return Preset({**config, "vision_config": {**SIGLIP, "image_size": side}, "text_config": language})


PRESETS = {f"{name}-{side}": _model(language, side) for name, language in LANGUAGES.items() for side in SIDES}
