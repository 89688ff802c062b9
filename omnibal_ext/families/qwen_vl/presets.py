"""Qwen2-VL's to Qwen3-VL's models, a line each."""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.architectures.vision import NativeResolution, VisionArchitecture
from omnibal_ext.families.towers.sizes import LANGUAGE_MODELS, qwen


def _qwen_vl(name: str, language: LanguageArchitecture, later_ffn: int, tied: bool) -> Architecture:
    """Qwen2.5-VL; or Qwen2-VL, without `later_ffn`, the width of the ViT's gated perceptron."""
    common = VisionArchitecture(
        32, 1280, 16, 5120, image_size=14, activation="quick_gelu", patch_bias=False, layer_scale=False, pixels="clip",
        native=NativeResolution(),
    )  # fmt: skip
    later = replace(
        common, ffn_hidden_size=later_ffn, normalization="RMSNorm", activation="silu", gated=True,
        native=NativeResolution(window=4, full_layers=(7, 15, 23, 31), positions_per_second=2.0),
    )  # fmt: skip
    language = replace(language, rotary_sections=(16, 24, 24))
    prompt = PromptFormat("qwen-vl", 151655, "qwen2.5-vl" if later_ffn else "qwen-vl", "native")
    vision = later if later_ffn else common
    kind = "qwen2_5_vl" if later_ffn else "qwen2_vl"
    types = (kind, f"{kind}_text")
    return Architecture(name, vision, language, projector_norm=False, tied=tied, prompt=prompt, types=types)


def _qwen3_vl(name: str, language: LanguageArchitecture, vision: VisionArchitecture, tied: bool) -> Architecture:
    language = replace(language, rope_theta=5e6, rotary_sections=(24, 20, 20), rotary_interleaved=True)
    prompt = PromptFormat("qwen3-vl", 151655, "qwen3-vl", "native")
    kind = "qwen3_vl_moe" if language.experts else "qwen3_vl"
    types = (kind, f"{kind}_text")
    return Architecture(name, vision, language, projector_norm=False, tied=tied, prompt=prompt, types=types)


def _vit(layers: int, hidden_size: int, ffn_hidden_size: int, features: tuple[int, ...]) -> VisionArchitecture:
    return VisionArchitecture(
        layers, hidden_size, 16, ffn_hidden_size, patch_size=16, image_size=16, activation="gelu_tanh",
        layer_scale=False, pixels="half", native=NativeResolution(learned_positions=48), feature_layers=features,
    )  # fmt: skip


VIT, VIT_LARGE = _vit(24, 1024, 4096, (5, 11, 17)), _vit(27, 1152, 4304, (8, 16, 24))
QWEN3_VL: dict[str, tuple[str, VisionArchitecture, bool]] = {
    "qwen3-vl-2b": ("qwen3-1.7b", VIT, True),
    "qwen3-vl-4b": ("qwen3-4b", VIT, True),
    "qwen3-vl-8b": ("qwen3-8b", VIT_LARGE, False),
    "qwen3-vl-32b": ("qwen3-32b", VIT_LARGE, False),
    "qwen3-vl-30b-a3b": ("qwen3-30b-a3b", VIT_LARGE, False),
    "qwen3-vl-235b-a22b": ("qwen3-235b-a22b", VIT_LARGE, False),
}
QWEN_VL: dict[str, tuple[LanguageArchitecture, int, bool]] = {
    "qwen2-vl-2b": (qwen(28, 1536, 12, 2, 8960, 151936), 0, True),
    "qwen2-vl-7b": (qwen(28, 3584, 28, 4, 18944, 152064), 0, False),
    "qwen2-vl-72b": (qwen(80, 8192, 64, 8, 29568, 152064), 0, False),
    "qwen2.5-vl-3b": (qwen(36, 2048, 16, 2, 11008, 151936), 3420, True),
    "qwen2.5-vl-7b": (qwen(28, 3584, 28, 4, 18944, 152064), 3420, False),
    "qwen2.5-vl-32b": (qwen(64, 5120, 40, 8, 27648, 152064), 3456, False),
    "qwen2.5-vl-72b": (qwen(80, 8192, 64, 8, 29568, 152064), 3456, False),
}
PRESETS = {
    **{name: _qwen_vl(name, *parts) for name, parts in QWEN_VL.items()},
    **{name: _qwen3_vl(name, LANGUAGE_MODELS[parts[0]], *parts[1:]) for name, parts in QWEN3_VL.items()},
}
