"""Presets of GLM-V's models, a line each. Sizes are transformers' defaults; of GLM-4.6V from memory, as GLM-4.5V's."""

from omnibal_ext.families.family import Preset

DENSE_ROPE = {"rope_parameters": {"partial_rotary_factor": 0.5}}
MIXTURE = {
    "model_type": "glm4v_moe", "vision_config": {"intermediate_size": 10944},
    "text_config": {"vocab_size": 151552, "head_dim": 128},
}  # fmt: skip
LATER = {"image_markup": "glm-4.6v"}
"""The processor of GLM-4.6V has a class of its own, by which times of a video's frames are written."""
PRESETS = {
    "glm-4.1v-9b": Preset({"model_type": "glm4v", "text_config": DENSE_ROPE}),
    "glm-4.5v": Preset(MIXTURE),
    "glm-4.6v": Preset(MIXTURE, LATER),
    "glm-4.6v-flash": Preset({"model_type": "glm46v", "image_token_id": 151363, "text_config": DENSE_ROPE}),
}
