"""Presets of Mistral 3's models, a line each."""

from typing import Any

from omnibal_ext.families.family import Preset
from omnibal_ext.families.fields import text

PIXTRAL = {"patch_size": 14, "hidden_act": "silu"}


def _mistral(kind: str, *sizes: int, tied: bool = False, **more: Any) -> Preset:
    words = text(*sizes, 131072, model_type=kind, head_dim=128, rms_norm_eps=1e-5, sliding_window=None, **more)
    return Preset(
        {"model_type": "mistral3", "vision_config": PIXTRAL, "text_config": words, "tie_word_embeddings": tied}
    )


SMALL = _mistral("mistral", 40, 5120, 32, 8, 32768, rope_theta=1e9)
PRESETS = {
    "mistral-small-3.1-24b": SMALL,
    "mistral-small-3.2-24b": SMALL,
    "ministral-3-3b": _mistral("ministral3", 26, 3072, 32, 8, 9216, tied=True),
    "ministral-3-8b": _mistral("ministral3", 34, 4096, 32, 8, 14336),
}
