"""Mistral 3's models, a line each."""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.language import LanguageArchitecture, RopeScaling
from omnibal_ext.architectures.vision import NativeResolution, VisionArchitecture

PIXTRAL = VisionArchitecture(
    24, 1024, 16, 4096, image_size=14, normalization="RMSNorm", norm_epsilon=1e-5, qkv_bias=False, bias=False,
    activation="silu", gated=True, patch_bias=False, pre_norm=True, layer_scale=False, pixels="clip",
    native=NativeResolution(frames=1, columns_between=True),
)  # fmt: skip
SMALL = LanguageArchitecture(40, 5120, 32, 8, 32768, vocab_size=131072, rope_theta=1e9, head_size=128)


YARN = RopeScaling("yarn", 16.0, 1.0, 32.0, 16384, amplitude=1.0, query_beta=0.1)
MINISTRALS = {
    "ministral-3-3b": LanguageArchitecture(26, 3072, 32, 8, 9216, 131072, head_size=128, rope_scaling=YARN),
    "ministral-3-8b": LanguageArchitecture(34, 4096, 32, 8, 14336, 131072, rope_scaling=YARN),
}


def _mistral(name: str, language: LanguageArchitecture, kind: str, tied: bool = False) -> Architecture:
    prompt = PromptFormat("mistral", 10, "mistral-v7", "native_edge")
    return Architecture(
        name, PIXTRAL, language, merger="matrix", projector_bias=False, tied=tied, prompt=prompt,
        types=("mistral3", kind),
    )  # fmt: skip


PRESETS = {
    **{name: _mistral(name, SMALL, "mistral") for name in ("mistral-small-3.1-24b", "mistral-small-3.2-24b")},
    **{name: _mistral(name, one, "ministral3", name.endswith("3b")) for name, one in MINISTRALS.items()},
}
