"""Presets of Idefics 3 and SmolVLM, a line each."""

from typing import Any

from omnibal_ext.families.family import Preset
from omnibal_ext.families.fields import text, tower
from omnibal_ext.families.towers.sizes import SIGLIP

BASE = tower(12, 768, 12, 3072, patch_size=16, image_size=512)
ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA = text(32, 4096, 32, 8, 14336, 128259, rope_theta=5e5, rope_scaling=ROPE)
SMOL_1_7B = text(24, 2048, 32, 32, 8192, 49155, rope_theta=273768.0)
SMOL_360M = text(32, 960, 15, 5, 2560, 49280, rope_theta=1e5)


def _model(vision: dict[str, Any], language: dict[str, Any], square: int, token: int) -> Preset:
    """Return a preset; `square`: side, in patches, of what becomes one token, `token`: id of the image token."""
    language = {**language, "rms_norm_eps": 1e-5}
    return Preset(
        {
            "model_type": "idefics3", "vision_config": vision, "text_config": language, "scale_factor": square,
            "image_token_id": token,
        }
    )  # fmt: skip


PRESETS = {
    "idefics3-8b": _model({**SIGLIP, "image_size": 364}, LLAMA, 2, 128257),
    "smolvlm-2.2b": _model(SIGLIP, SMOL_1_7B, 3, 49153),
    "smolvlm-500m": _model(BASE, SMOL_360M, 4, 49190),
}
