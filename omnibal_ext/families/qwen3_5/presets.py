"""Qwen3.5 and Qwen3.6, a line each.

Sources: transformers' defaults (9B, 35B-A3B), the models' cards (27B, 122B-A10B). Qwen3.6 has the sizes of Qwen3.5.
"""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.experts import Experts
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.architectures.linear_attention import LinearAttention
from omnibal_ext.families.qwen_vl.presets import VIT_LARGE

QWEN3_5: dict[str, tuple[int, int, int, int, int, int, Experts | None]] = {
    "qwen3.5-9b": (32, 4096, 16, 4, 12288, 32, None),
    "qwen3.5-27b": (64, 5120, 24, 4, 17408, 48, None),
    "qwen3.5-35b-a3b": (40, 2048, 16, 2, 512, 32, Experts(256, 8, shared=512)),
    "qwen3.5-122b-a10b": (48, 3072, 32, 2, 1024, 64, Experts(256, 8, shared=1024)),
    "qwen3.6-27b": (64, 5120, 24, 4, 17408, 48, None),
    "qwen3.6-35b-a3b": (40, 2048, 16, 2, 512, 32, Experts(256, 8, shared=512)),
}
"""Name: layers, width, heads, heads of keys and values, width of a perceptron, heads of linear attention, experts."""


def _qwen3_5(
    name: str, layers: int, hidden_size: int, heads: int, kv_heads: int,
    ffn_hidden_size: int, linear_heads: int, experts: Experts | None,
) -> Architecture:  # fmt: skip
    """One of them, with Qwen3-VL's larger ViT, of which no features enter later; each fourth language layer is full
    attention, the others have 16 heads of queries and keys."""
    linear = tuple(layer for layer in range(layers) if (layer + 1) % 4)
    language = LanguageArchitecture(
        layers, hidden_size, heads, kv_heads, ffn_hidden_size, vocab_size=248320, rope_theta=1e7, norm_epsilon=1e-6,
        qk_norm=True, head_size=None if 256 * heads == hidden_size else 256, rotary_sections=(11, 11, 10),
        rotary_interleaved=True, centred_norms=True, experts=experts,
        linear=LinearAttention(linear, 16, linear_heads, 128, 128, 4), output_gate=True, rotated=64,
    )  # fmt: skip
    prompt = PromptFormat("qwen3-vl", 248056, name.partition("-")[0], "native")  # the template's name is the model's
    vision, kind = replace(VIT_LARGE, feature_layers=()), "qwen3_5_moe" if experts else "qwen3_5"
    types = (kind, f"{kind}_text")
    return Architecture(name, vision, language, projector_norm=False, prompt=prompt, types=types)


PRESETS = {name: _qwen3_5(name, *parts) for name, parts in QWEN3_5.items()}
