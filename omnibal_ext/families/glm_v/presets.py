"""GLM-V's models, a line each. Sizes are transformers' defaults; of GLM-4.6V from memory, as GLM-4.5V's."""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.experts import Experts
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.architectures.vision import NativeResolution, VisionArchitecture

VIT = VisionArchitecture(
    24, 1536, 12, 4096, image_size=14, normalization="RMSNorm", norm_epsilon=1e-5, qkv_bias=False, bias=False,
    activation="silu", gated=True, pre_norm=True, final_norm=True, layer_scale=False, pixels="clip",
    native=NativeResolution(learned_positions=24, bicubic=True),
)  # fmt: skip
DENSE = LanguageArchitecture(
    40, 4096, 32, 2, 13696, vocab_size=151552, rope_theta=1e4, qkv_bias=True, rotary_sections=(8, 12, 12), rotated=64,
    branch_norms=True,
)  # fmt: skip
MIXTURE = LanguageArchitecture(
    46, 4096, 96, 8, 1408, vocab_size=151552, rope_theta=1e4, qkv_bias=True, head_size=128, rotary_sections=(8, 12, 12),
    rotated=64,
    experts=Experts(
        128, 8, balance=1e-4, shared=1408, shared_gate=False, sigmoids=True, dense_layers=1, dense_width=10944
    ),
)  # fmt: skip


def _glm(name: str, kind: str, language: LanguageArchitecture, image_token: int, markup: str) -> Architecture:
    text = "glm4v_moe_text" if language.experts else "glm4v_text"
    template = "glm-4.1v" if kind == "glm4v" else "glm-4.5v"
    return Architecture(
        name, VIT, language, merger="gated", merger_width=10944 if language.experts else 13696, projector_norm=False,
        prompt=PromptFormat(markup, image_token, template, "native_grown"), types=(kind, text),
    )  # fmt: skip


PRESETS = {
    "glm-4.1v-9b": _glm("glm-4.1v-9b", "glm4v", DENSE, 151343, "glm-4.1v"),
    "glm-4.5v": _glm("glm-4.5v", "glm4v_moe", MIXTURE, 151363, "glm-4.1v"),
    "glm-4.6v": _glm("glm-4.6v", "glm4v_moe", MIXTURE, 151363, "glm-4.6v"),
    "glm-4.6v-flash": _glm("glm-4.6v-flash", "glm46v", DENSE, 151363, "glm-4.6v"),
}
