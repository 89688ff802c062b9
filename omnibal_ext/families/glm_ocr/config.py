"""Read the config.json of GLM-OCR: GLM-V's language model with heads of a width of their own, and its ViT with biases,
norms of query and key, and no learned positions."""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.families.glm_v.config import read_dense, read_vision, whole
from omnibal_ext.families.section import Section

COLOURS = 3
"""Ratio of the inner width of the merger's MLP to its width."""


def read_glm_ocr(name: str, config: Section) -> Architecture:
    """Read a glm_ocr's config.json. Raises UserError naming an unsupported field."""
    tower, text = config.towers("glm_ocr_vision", "glm_ocr_text")
    language = read_dense(text, text.take_if("head_dim"), qkv_bias=False)
    vision = read_vision(tower, language.hidden_size)
    vision = replace(
        vision,
        ffn_hidden_size=tower.take("intermediate_size"),
        bias=vision.qkv_bias,
        query_key_norms=True,
        pre_norm=False,
        native=vision.native and replace(vision.native, learned_positions=None, bicubic=False),
    )
    tower.refuse_unread()
    prompt = PromptFormat("glm-4.6v", config.take("image_token_id"), None, "native_grown")
    return whole(name, config, text, vision, language, COLOURS * language.hidden_size, prompt)
