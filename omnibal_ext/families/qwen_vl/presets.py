"""Presets of Qwen2-VL to Qwen3-VL, a line each."""

from typing import Any

from omnibal_ext.families.family import Preset
from omnibal_ext.families.towers.sizes import LANGUAGE_MODELS, qwen


def _model(kind: str, vision: dict[str, Any], words: dict[str, Any], tied: bool) -> Preset:
    return Preset({"model_type": kind, "vision_config": vision, "text_config": words, "tie_word_embeddings": tied})


def _qwen2(*sizes: int, tied: bool = False) -> Preset:
    return _model("qwen2_vl", {"hidden_size": sizes[1]}, qwen(*sizes), tied)


def _qwen2_5(*sizes: int, inner: int, tied: bool = False) -> Preset:
    """Return a preset of Qwen2.5-VL; `inner`: width of the ViT's MLP."""
    vision = {"hidden_size": 1280, "out_hidden_size": sizes[1], "intermediate_size": inner, "tokens_per_second": 2}
    return _model("qwen2_5_vl", vision, qwen(*sizes), tied)


def _qwen3(language: str, vision: dict[str, Any], tied: bool = False) -> Preset:
    words = {**LANGUAGE_MODELS[language], "rope_theta": 5e6}
    kind = "qwen3_vl_moe" if "num_experts" in words else "qwen3_vl"
    return _model(kind, {**vision, "out_hidden_size": words["hidden_size"]}, words, tied)


SMALL = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
LARGE: dict[str, Any] = {}
PRESETS = {
    "qwen2-vl-2b": _qwen2(28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2-vl-7b": _qwen2(28, 3584, 28, 4, 18944, 152064),
    "qwen2-vl-72b": _qwen2(80, 8192, 64, 8, 29568, 152064),
    "qwen2.5-vl-3b": _qwen2_5(36, 2048, 16, 2, 11008, 151936, inner=3420, tied=True),
    "qwen2.5-vl-7b": _qwen2_5(28, 3584, 28, 4, 18944, 152064, inner=3420),
    "qwen2.5-vl-32b": _qwen2_5(64, 5120, 40, 8, 27648, 152064, inner=3456),
    "qwen2.5-vl-72b": _qwen2_5(80, 8192, 64, 8, 29568, 152064, inner=3456),
    "qwen3-vl-2b": _qwen3("qwen3-1.7b", SMALL, tied=True),
    "qwen3-vl-4b": _qwen3("qwen3-4b", SMALL, tied=True),
    "qwen3-vl-8b": _qwen3("qwen3-8b", LARGE),
    "qwen3-vl-32b": _qwen3("qwen3-32b", LARGE),
    "qwen3-vl-30b-a3b": _qwen3("qwen3-30b-a3b", LARGE),
    "qwen3-vl-235b-a22b": _qwen3("qwen3-235b-a22b", LARGE),
}
