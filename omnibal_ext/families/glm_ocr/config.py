"""Reads the config.json of GLM-OCR: GLM-V's language model with heads of a width of their own, and its ViT with biases,
norms of query and key, and no learned positions."""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.architectures.vision import NativeResolution, VisionArchitecture
from omnibal_ext.errors import UserError
from omnibal_ext.families.glm_v.config import read_dense, read_tied
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import EPSILON, HEADS, LAYERS, TOKEN, WIDTH
from omnibal_ext.families.towers.native import ACTIVATIONS, SIDE, check_heads, rotary_base
from omnibal_ext.reading.checks import flag, integer

COLOURS = 3
"""The merger's inner width is as many times its own."""


def read_glm_ocr(name: str, config: Section) -> Architecture:
    """The model of a glm_ocr's config.json. Raises UserError naming a field that cannot be honoured."""
    tower, text = config.inner("vision_config", "glm_ocr_vision"), config.inner("text_config", "glm_ocr_text")
    tower.must_be("glm_ocr_vision")
    text.must_be("glm_ocr_text")
    language = read_dense(text, text.take_if("head_dim", WIDTH), qkv_bias=False)
    if (given := tower.take("out_hidden_size", WIDTH)) != language.hidden_size:
        raise UserError(
            f"{tower.where}: gives features of width {given}, the language model has {language.hidden_size}"
        )
    return Architecture(
        name,
        _vision(tower),
        language,
        merger="gated",
        merger_width=COLOURS * language.hidden_size,
        projector_norm=False,
        tied=read_tied(config),
        prompt=PromptFormat("glm-4.6v", config.take("image_token_id", TOKEN), None, "native_grown"),
        types=("glm_ocr", "glm_ocr_text"),
    )


def _vision(tower: Section) -> VisionArchitecture:
    tower.must(in_channels=COLOURS, attention_dropout=0.0, spatial_merge_size=2)
    width, heads, patch = (
        tower.take(*field) for field in (("hidden_size", WIDTH), ("num_heads", HEADS), ("patch_size", SIDE))
    )
    check_heads(tower, width, heads)
    biased = tower.take("attention_bias", flag)
    vision = VisionArchitecture(
        layers=tower.take("depth", LAYERS),
        hidden_size=width,
        heads=heads,
        ffn_hidden_size=tower.take("intermediate_size", WIDTH),
        patch_size=patch,
        image_size=patch,
        normalization="RMSNorm",
        norm_epsilon=tower.take("rms_norm_eps", EPSILON),
        qkv_bias=biased,
        bias=biased,
        query_key_norms=True,
        activation=tower.choose("hidden_act", ACTIVATIONS),
        gated=True,
        final_norm=True,
        layer_scale=False,
        pixels="clip",
        native=NativeResolution(
            frames=tower.take("temporal_patch_size", integer(1, 2**10)), theta=rotary_base(tower)
        ),
    )  # fmt: skip
    tower.refuse_unread()
    return vision
