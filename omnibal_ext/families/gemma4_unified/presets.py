"""The model of Gemma 4 without towers, whose sizes add up to the number of weights that its card says."""

from omnibal_ext.families.family import Preset
from omnibal_ext.families.gemma4.presets import gemma_4_text

WORDS = gemma_4_text(48, 3840, 16, 8, 15360, num_global_key_value_heads=1)
PRESETS = {
    "gemma-4-12b": Preset({"model_type": "gemma4_unified", "vision_config": {"patch_size": 16}, "text_config": WORDS})
}
