"""Presets of Qwen3.5 and Qwen3.6, a line each.

Sources: transformers' defaults (9B, 35B-A3B), the models' cards (27B, 122B-A10B). Qwen3.6 has the sizes of Qwen3.5.
"""

from typing import Any

from omnibal_ext.families.family import Preset
from omnibal_ext.families.fields import text

ROPE = {"rope_theta": 1e7}


def _dense(*sizes: int, linear: int) -> dict[str, Any]:
    """Return a dense language model's config.json; `linear`: value heads of linear attention."""
    words = text(*sizes, 248320, linear_num_value_heads=linear, rope_parameters=ROPE)
    return {"model_type": "qwen3_5", "vision_config": {"out_hidden_size": sizes[1]}, "text_config": words}


def _mixture(*sizes: int, linear: int) -> dict[str, Any]:
    """Return a language model's config.json with experts and a shared one, as wide as the last of `sizes`."""
    config, width = _dense(*sizes, linear=linear), sizes[-1]
    config["text_config"] |= {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
    return config | {"model_type": "qwen3_5_moe"}


QWEN3_5 = {
    "qwen3.5-9b": _dense(32, 4096, 16, 4, 12288, linear=32),
    "qwen3.5-27b": _dense(64, 5120, 24, 4, 17408, linear=48),
    "qwen3.5-35b-a3b": _mixture(40, 2048, 16, 2, 512, linear=32),
    "qwen3.5-122b-a10b": _mixture(48, 3072, 32, 2, 1024, linear=64),
    "qwen3.6-27b": _dense(64, 5120, 24, 4, 17408, linear=48),
    "qwen3.6-35b-a3b": _mixture(40, 2048, 16, 2, 512, linear=32),
}
PRESETS = {
    name: Preset(config, {"chat_template": name.partition("-")[0]})  # the template's name is the model's
    for name, config in QWEN3_5.items()
}
