"""Models of Idefics 3 and SmolVLM, a line each."""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.language import LanguageArchitecture, RopeScaling
from omnibal_ext.architectures.vision import VisionArchitecture
from omnibal_ext.families.towers.sizes import SIGLIP

SO400M = replace(SIGLIP, layers=27, final_norm=True)
BASE = VisionArchitecture(
    12, 768, 12, 3072, patch_size=16, image_size=512, activation="gelu_tanh", class_token=False, final_norm=True,
    layer_scale=False, pixels="half",
)  # fmt: skip
LLAMA = LanguageArchitecture(
    32, 4096, 32, 8, 14336, vocab_size=128259, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0)
)
SMOL_1_7B = LanguageArchitecture(24, 2048, 32, 32, 8192, vocab_size=49155, rope_theta=273768.0)
SMOL_360M = LanguageArchitecture(32, 960, 15, 5, 2560, vocab_size=49280, rope_theta=1e5)


def _model(
    name: str, template: str, vision: VisionArchitecture, language: LanguageArchitecture, square: int, token: int
) -> Architecture:
    """Which joins so many patches a side; its image token has that id."""
    return Architecture(
        name, vision, language, shuffle=square, projector_norm=False, projector_bias=False, merger="shuffled",
        prompt=PromptFormat("idefics3", token, template, "split"), types=("idefics3", "llama"),
    )  # fmt: skip


PRESETS = {
    model.name: model
    for model in (
        _model("idefics3-8b", "idefics3", replace(SO400M, image_size=364), LLAMA, 2, 128257),
        _model("smolvlm-2.2b", "smolvlm", SO400M, SMOL_1_7B, 3, 49153),
        _model("smolvlm-500m", "smolvlm", BASE, SMOL_360M, 4, 49190),
    )
}
