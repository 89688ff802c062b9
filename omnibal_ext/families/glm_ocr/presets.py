"""GLM-OCR's model, from memory."""

from omnibal_ext.families.family import Preset
from omnibal_ext.families.fields import text

WORDS = text(16, 1536, 16, 8, 4608, 59392, head_dim=128, rope_parameters={"mrope_section": [16, 24, 24]})
PRESETS = {"glm-ocr": Preset({"model_type": "glm_ocr", "text_config": WORDS})}
