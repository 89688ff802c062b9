"""Sizes of the towers that presets are made of, a line each.

Sources: the published configurations of InternViT, CLIP, SigLIP, InternLM2, Qwen, Llama, Mistral, Vicuna and Yi.
Vocabularies are those of the vision-language model, with its image tokens, not of the language model it started from.
"""

from omnibal_ext.architectures.experts import Experts
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.architectures.vision import VisionArchitecture

SIGLIP = VisionArchitecture(
    26, 1152, 16, 4304, image_size=384, activation="gelu_tanh", class_token=False, layer_scale=False, pixels="half"
)
"""SigLIP so400m, 26 of its 27 layers, as LLaVA-OneVision has it."""
VISION_TOWERS = {
    "internvit-6b": VisionArchitecture(45, 3200, 25, 12800, normalization="RMSNorm", qkv_bias=False, qk_norm=True),
    "internvit-300m": VisionArchitecture(24, 1024, 16, 4096),
    # 24 layers, the last of which LLaVA does not use.
    "clip-l-336": VisionArchitecture(
        23, 1024, 16, 4096, image_size=336, norm_epsilon=1e-5, activation="quick_gelu", patch_bias=False, pre_norm=True,
        layer_scale=False, pixels="clip",
    ),
    # EVA-CLIP (arXiv 2303.15389, 2402.04252), sizes only: what the planner needs.
    "eva-clip-1b": VisionArchitecture(40, 1408, 16, 6144),
    "eva-clip-4b": VisionArchitecture(64, 1792, 16, 15360),
    "eva-clip-8b": VisionArchitecture(32, 4096, 32, 20480),
    "eva-clip-18b": VisionArchitecture(48, 5120, 40, 25600),
}  # fmt: skip


def qwen(
    layers: int, hidden_size: int, heads: int, kv_heads: int, ffn_hidden_size: int, vocab_size: int = 151674
) -> LanguageArchitecture:
    """Qwen 2 and 2.5."""
    return LanguageArchitecture(
        layers, hidden_size, heads, kv_heads, ffn_hidden_size, vocab_size, norm_epsilon=1e-6, qkv_bias=True
    )


def _qwen3(
    layers: int, hidden_size: int, heads: int, ffn_hidden_size: int, kv_heads: int = 8, experts: Experts | None = None
) -> LanguageArchitecture:
    return LanguageArchitecture(
        layers, hidden_size, heads, kv_heads, ffn_hidden_size, vocab_size=151936, norm_epsilon=1e-6, qk_norm=True,
        head_size=None if hidden_size == 128 * heads else 128, experts=experts,
    )  # fmt: skip


LANGUAGE_MODELS = {
    "internlm2-1.8b": LanguageArchitecture(24, 2048, 16, 8, 8192, vocab_size=92553),
    "internlm2-7b": LanguageArchitecture(32, 4096, 32, 8, 14336, vocab_size=92553),
    "internlm2-20b": LanguageArchitecture(48, 6144, 48, 8, 16384, vocab_size=92553),
    "qwen2-0.5b": qwen(24, 896, 14, 2, 4864, vocab_size=151655),
    "qwen2.5-0.5b": qwen(24, 896, 14, 2, 4864),
    "qwen2.5-1.5b": qwen(28, 1536, 12, 2, 8960),
    "qwen2.5-3b": qwen(36, 2048, 16, 2, 11008),
    "qwen2.5-7b": qwen(28, 3584, 28, 4, 18944),
    "qwen2.5-14b": qwen(48, 5120, 40, 8, 13824),
    "qwen2.5-32b": qwen(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": qwen(80, 8192, 64, 8, 29568),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 768, kv_heads=4, experts=Experts(128, 8)),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 1536, kv_heads=4, experts=Experts(128, 8)),
    "qwen1.5-110b": LanguageArchitecture(80, 8192, 64, 8, 49152, 152064, norm_epsilon=1e-6, qkv_bias=True),
    "yi-34b": LanguageArchitecture(60, 7168, 56, 8, 20480, vocab_size=64064, rope_theta=5e6),
    "llama3-8b": LanguageArchitecture(32, 4096, 32, 8, 14336, vocab_size=128320, rope_theta=5e5),
    "llama3-70b": LanguageArchitecture(80, 8192, 64, 8, 28672, vocab_size=128320, rope_theta=5e5),
    "mistral-7b": LanguageArchitecture(32, 4096, 32, 8, 14336, vocab_size=32064, rope_theta=1e6),
    "vicuna-7b": LanguageArchitecture(32, 4096, 32, 32, 11008, vocab_size=32064, rope_theta=1e4),
    "vicuna-13b": LanguageArchitecture(40, 5120, 40, 40, 13824, vocab_size=32064, rope_theta=1e4),
}


def language_type(language: LanguageArchitecture) -> str:
    """A model type of config.json whose weights have the names that those of this one have here."""
    return "qwen3_moe" if language.experts else "llama"
