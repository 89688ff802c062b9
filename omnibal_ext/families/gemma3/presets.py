"""Presets of Gemma 3's models, a line each."""

from typing import Any

from omnibal_ext.families.family import Preset
from omnibal_ext.families.fields import text
from omnibal_ext.families.towers.sizes import SIGLIP

ROPE = {"rope_type": "linear", "factor": 8.0}


def _gemma(*sizes: int, **more: Any) -> Preset:
    words = text(*sizes, 262208, sliding_window=1024, rope_scaling=ROPE, **more)
    return Preset({"model_type": "gemma3", "vision_config": {**SIGLIP, "image_size": 896}, "text_config": words})


PRESETS = {
    "gemma-3-4b": _gemma(34, 2560, 8, 4, 10240),
    "gemma-3-12b": _gemma(48, 3840, 16, 8, 15360),
    "gemma-3-27b": _gemma(62, 5376, 32, 16, 21504, head_dim=128, query_pre_attn_scalar=168),
}
