"""LightOnOCR's models, a line each."""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.families.mistral3.presets import PIXTRAL
from omnibal_ext.families.towers.sizes import LANGUAGE_MODELS

PRESETS = {
    "lighton-ocr-1b": Architecture(
        "lighton-ocr-1b", PIXTRAL, LANGUAGE_MODELS["qwen3-0.6b"], merger="matrix", projector_bias=False, tied=True,
        prompt=PromptFormat("lighton_ocr", 151655, None, "native_edge"), types=("lighton_ocr", "qwen3"),
    )
}  # fmt: skip
