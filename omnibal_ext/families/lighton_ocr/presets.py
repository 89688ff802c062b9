"""LightOnOCR's model: its class's defaults."""

from omnibal_ext.families.family import Preset

PRESETS = {"lighton-ocr-1b": Preset({"model_type": "lighton_ocr"})}
