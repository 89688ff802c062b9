"""GLM-OCR's model, from memory."""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.architectures.vision import NativeResolution, VisionArchitecture

VIT = VisionArchitecture(
    24, 1024, 16, 4096, image_size=14, normalization="RMSNorm", norm_epsilon=1e-5, query_key_norms=True,
    activation="silu", gated=True, final_norm=True, layer_scale=False, pixels="clip", native=NativeResolution(),
)  # fmt: skip
TEXT = LanguageArchitecture(
    16, 1536, 16, 8, 4608, vocab_size=59392, rope_theta=1e4, head_size=128, rotary_sections=(16, 24, 24),
    branch_norms=True,
)  # fmt: skip
PRESETS = {
    "glm-ocr": Architecture(
        "glm-ocr", VIT, TEXT, merger="gated", merger_width=4608, projector_norm=False,
        prompt=PromptFormat("glm-4.6v", 59280, None, "native_grown"), types=("glm_ocr", "glm_ocr_text"),
    )
}  # fmt: skip
