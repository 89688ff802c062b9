"""Sizes of the towers that presets are made of, as sections of a config.json.

Sources: the published configurations of InternViT, CLIP, SigLIP, InternLM2, Qwen, Llama, Mistral, Vicuna and Yi.
Vocabularies are those of the vision-language model, with its image tokens, not of the language model it started from.
"""

from collections.abc import Mapping
from typing import Any

from omnibal_ext.families.fields import text, tower

SIGLIP: dict[str, Any] = tower(27, 1152, 16, 4304, model_type="siglip_vision_model", image_size=384, patch_size=14)
"""SigLIP so400m."""
VISION_TOWERS: Mapping[str, dict[str, Any]] = {
    "internvit-6b": tower(45, 3200, 25, 12800, norm_type="rms_norm", use_qk_norm=True),
    "internvit-300m": tower(24, 1024, 16, 4096, attention_bias=True),
    "clip-l-336": tower(24, 1024, 16, 4096, model_type="clip_vision_model", image_size=336, patch_size=14),
    # EVA-CLIP (arXiv 2303.15389, 2402.04252), sizes only: what the planner needs.
    "eva-clip-1b": tower(40, 1408, 16, 6144, attention_bias=True),
    "eva-clip-4b": tower(64, 1792, 16, 15360, attention_bias=True),
    "eva-clip-8b": tower(32, 4096, 32, 20480, attention_bias=True),
    "eva-clip-18b": tower(48, 5120, 40, 25600, attention_bias=True),
}


def qwen(*sizes: int) -> dict[str, Any]:
    """Return the config.json of a Qwen 2 or 2.5 of these sizes, in the order of `text`."""
    return text(*sizes, model_type="qwen2", rope_theta=1e6, rms_norm_eps=1e-6)


def _qwen3(*sizes: int, **more: Any) -> dict[str, Any]:
    kind = "qwen3_moe" if more else "qwen3"
    return text(*sizes, 151936, model_type=kind, head_dim=128, rope_theta=1e6, rms_norm_eps=1e-6, **more)


def _experts(width: int) -> dict[str, Any]:
    return {"moe_intermediate_size": width, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}


def _internlm2(*sizes: int) -> dict[str, Any]:
    return text(*sizes, 92553, model_type="internlm2", bias=False, rope_theta=1e6, rms_norm_eps=1e-5)


def _llama(*sizes: int, rope_theta: float, model_type: str = "llama") -> dict[str, Any]:
    return text(*sizes, model_type=model_type, rope_theta=rope_theta, rms_norm_eps=1e-5, sliding_window=None)


LANGUAGE_MODELS: Mapping[str, dict[str, Any]] = {
    "internlm2-1.8b": _internlm2(24, 2048, 16, 8, 8192),
    "internlm2-7b": _internlm2(32, 4096, 32, 8, 14336),
    "internlm2-20b": _internlm2(48, 6144, 48, 8, 16384),
    "qwen2-0.5b": qwen(24, 896, 14, 2, 4864, 151655),
    "qwen2.5-0.5b": qwen(24, 896, 14, 2, 4864, 151674),
    "qwen2.5-1.5b": qwen(28, 1536, 12, 2, 8960, 151674),
    "qwen2.5-3b": qwen(36, 2048, 16, 2, 11008, 151674),
    "qwen2.5-7b": qwen(28, 3584, 28, 4, 18944, 151674),
    "qwen2.5-14b": qwen(48, 5120, 40, 8, 13824, 151674),
    "qwen2.5-32b": qwen(64, 5120, 40, 8, 27648, 151674),
    "qwen2.5-72b": qwen(80, 8192, 64, 8, 29568, 151674),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 4, 6144, **_experts(768)),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 4, 12288, **_experts(1536)),
    "qwen1.5-110b": qwen(80, 8192, 64, 8, 49152, 152064),
    "yi-34b": _llama(60, 7168, 56, 8, 20480, 64064, rope_theta=5e6),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128320, rope_theta=5e5),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128320, rope_theta=5e5),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32064, rope_theta=1e6, model_type="mistral"),
    "vicuna-7b": _llama(32, 4096, 32, 32, 11008, 32064, rope_theta=1e4),
    "vicuna-13b": _llama(40, 5120, 40, 40, 13824, 32064, rope_theta=1e4),
}
