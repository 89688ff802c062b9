"""Read LLaVA's config.json: CLIP, or SigLIP without tiles, a perceptron of two layers, any Llama-like model."""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.languages import read_language
from omnibal_ext.families.towers.llama import tied
from omnibal_ext.families.towers.tiles import clip, layers_read, siglip
from omnibal_ext.modalities.vision.architecture import VisionArchitecture

LLAVA_TEMPLATES = {32064: "vicuna", 128320: "llava-llama3"}
"""Vocabulary size -> chat template: Vicuna's and Llama 3's, with LLaVA's tokens."""
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""Grids of LLaVA-1.6, rows and columns of tiles."""


def read_llava(name: str, config: Section) -> Architecture:
    """Read LLaVA-1.5, LLaVA-1.6, LLaVA-Interleave, LLaVA-NeXT-Video. Raises UserError naming an unsupported field."""
    config.must(projector_hidden_act="gelu")
    tower, language = config.inner("vision_config", "clip_vision_model"), config.inner("text_config", "llama")
    newline = config["model_type"] != "llava"
    if config["model_type"] == "llava_next_video":
        language.asked.update(("factor", "type"))  # published next to the rotation's fields, where nothing reads them
    if tower["model_type"] == "siglip_vision_model" and not newline:
        config.must(vision_feature_select_strategy="full")  # which takes every patch: there is no class token
        return _of_llava(name, config, _siglip(tower, config), language, None, "fixed")
    vision = clip(tower, config["vision_feature_layer"])
    class_token = config.choose("vision_feature_select_strategy", {"default": False, "full": True})
    if newline:
        config.must(vision_feature_select_strategy="default", use_image_newline_parameter=True)
        grids = [[rows * vision.image_size, columns * vision.image_size] for rows, columns in GRIDS]
        if config["image_grid_pinpoints"] not in (None, grids):
            raise UserError(f"{config.where}.image_grid_pinpoints is not LLaVA-1.6's {grids}; no others are known")
    template, tiling = _llava_template(language), "anyres" if newline else "pad"
    return _of_llava(name, config, vision, language, template, tiling, class_token)


def read_vip_llava(name: str, config: Section) -> Architecture:
    """Read ViP-LLaVA: features of several CLIP layers, concatenated, no class token. Raises UserError as
    `read_llava`."""
    config.must(
        projector_hidden_act="gelu", projector_layernorm_eps=1e-5, vision_feature_select_strategy="default",
        multimodal_projector_bias=True,
    )  # fmt: skip
    tower, language = config.inner("vision_config", "clip_vision_model"), config.inner("text_config", "llama")
    layers = config["vision_feature_layer"]
    return Architecture(
        name,
        clip(tower, config.get("vision_feature_layers") or layers),  # as published, with the s
        read_language(language),
        shuffle=1,
        tied=tied(config),
        prompt=PromptFormat("llava", config.take("image_token_index"), "llava-v1", "pad"),
        types=("vipllava", language["model_type"]),
    )


def read_onevision(name: str, config: Section) -> Architecture:
    """Read LLaVA-OneVision. Raises UserError as `read_llava`."""
    config.must(
        projector_hidden_act="gelu", vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_9",
        use_image_newline_parameter=True,
    )  # fmt: skip
    tower, language = config.inner("vision_config", "siglip_vision_model"), config.inner("text_config", "qwen2")
    tower.must_be("siglip_vision_model")
    vision = _siglip(tower, config)
    side = vision.image_size
    grids = [[rows * side, columns * side] for rows in range(1, 7) for columns in range(1, 7)]
    if config.get("image_grid_pinpoints") not in (None, grids):
        raise UserError(f"{config.where}.image_grid_pinpoints is not LLaVA-OneVision's, of 1 to 6 tiles a side")
    return _of_llava(name, config, vision, language, "qwen-vl", "anyres_max_9")


def _siglip(tower: Section, config: Section) -> VisionArchitecture:
    """Read SigLIP as a tower whose features are a layer's output, before the last norm."""
    return siglip(tower, layers_read(tower, config["vision_feature_layer"])[0])


def _of_llava(
    name: str, config: Section, vision: VisionArchitecture, language: Section, template: str | None, tiling: str,
    class_token: bool = False,
) -> Architecture:  # fmt: skip
    return Architecture(
        name,
        vision,
        read_language(language),
        shuffle=1,
        projector_norm=False,
        projector_bias=config.take("multimodal_projector_bias"),
        class_token=class_token,
        newline=tiling not in ("pad", "fixed"),
        tied=tied(config, language.take("tie_word_embeddings")),
        prompt=PromptFormat("llava", config.take("image_token_index"), template, tiling),
        types=(config["model_type"], language["model_type"]),
    )


def _llava_template(language: Section) -> str | None:
    """Return the chat template of the model's training, if known: that of its processor does not end answers."""
    if language["model_type"] == "mistral":
        return "mistral"
    return LLAVA_TEMPLATES.get(language.take("vocab_size"))
