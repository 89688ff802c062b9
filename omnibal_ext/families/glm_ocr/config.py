"""Reads the config.json of GLM-OCR: GLM-V's language model with heads of a width of their own, and its ViT with biases,
norms of query and key, and no learned positions."""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.families.glm_v.config import read_dense, read_tied, read_vision
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import TOKEN, WIDTH

COLOURS = 3
"""The merger's inner width is as many times its own."""


def read_glm_ocr(name: str, config: Section) -> Architecture:
    """The model of a glm_ocr's config.json. Raises UserError naming a field that cannot be honoured."""
    tower, text = config.inner("vision_config", "glm_ocr_vision"), config.inner("text_config", "glm_ocr_text")
    tower.must_be("glm_ocr_vision")
    text.must_be("glm_ocr_text")
    language = read_dense(text, text.take_if("head_dim", WIDTH), qkv_bias=False)
    vision = read_vision(tower, language.hidden_size)
    vision = replace(
        vision,
        ffn_hidden_size=tower.take("intermediate_size", WIDTH),
        bias=vision.qkv_bias,
        query_key_norms=True,
        pre_norm=False,
        native=vision.native and replace(vision.native, learned_positions=None, bicubic=False),
    )
    tower.refuse_unread()
    return Architecture(
        name,
        vision,
        language,
        merger="gated",
        merger_width=COLOURS * language.hidden_size,
        projector_norm=False,
        tied=read_tied(config),
        prompt=PromptFormat("glm-4.6v", config.take("image_token_id", TOKEN), None, "native_grown"),
        types=("glm_ocr", "glm_ocr_text"),
    )
