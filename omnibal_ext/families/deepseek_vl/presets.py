"""DeepSeek-VL's models, a line each; sizes of the language model from memory of its published config.json."""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.architectures.vision import VisionArchitecture

SIGLIP_L = VisionArchitecture(
    24, 1024, 16, 4096, image_size=384, patch_size=16, class_token=False, final_norm=True, layer_scale=False,
    pixels="half",
)  # fmt: skip
DEEPSEEK_1_3B = LanguageArchitecture(24, 2048, 16, 16, 5504, vocab_size=102400, norm_epsilon=1e-6)
PRESETS = {
    "deepseek-vl-1.3b": Architecture(
        "deepseek-vl-1.3b", SIGLIP_L, DEEPSEEK_1_3B, shuffle=1, projector_norm=False,
        prompt=PromptFormat("deepseek-vl", 100015, "deepseek-vl", "letterbox"), types=("deepseek_vl", "llama"),
    )
}  # fmt: skip
