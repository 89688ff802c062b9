"""Read InternVL's config.json: transformers' form, and that of its own repository (`InternVLChatModel`)."""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.languages import read_language
from omnibal_ext.families.towers.llama import tied
from omnibal_ext.families.towers.tiles import layers_read, vision_sizes
from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.reading.checks import finite, text

NORMALIZATIONS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
ORIGINAL_TEMPLATES = {"internlm2-chat": "internlm2-chat", "Hermes-2": "hermes-2"}
"""InternVL's names of chat templates -> ours."""
LATER_TEMPLATES = {"internlm2": "internlm2-chat", "qwen2": "hermes-2", "qwen3": "hermes-2", "qwen3_moe": "hermes-2"}
"""Language model -> our name of its template "internvl2_5", which begins with `<s>` if the tokenizer does."""


def read_internvl(name: str, config: Section) -> Architecture:
    """Read InternVL's config.json in transformers' form. Raises UserError naming an unsupported field."""
    config.must(projector_hidden_act="gelu", vision_feature_select_strategy="default")
    tower, language = config.inner("vision_config", "internvl_vision"), config.inner("text_config", "qwen2")
    tower.must(use_absolute_position_embeddings=True, use_mask_token=False)
    if tower.take("use_qk_norm"):
        tower.must(layer_norm_eps=1e-6)  # transformers' QK-norm has this one whatever the layers' is
    layers, is_last = layers_read(tower, config["vision_feature_layer"])
    vision = VisionArchitecture(
        **vision_sizes(tower, layers),
        normalization=tower.choose("norm_type", NORMALIZATIONS),
        qkv_bias=tower.take("attention_bias"),
        qk_norm=tower.take("use_qk_norm"),
        final_norm=is_last and not tower.take("use_mean_pooling"),
    )
    tower.refuse_unread()
    if config.get("image_token_index") is not None:  # its first versions' name, which transformers ignores
        config.must(image_token_index=config["image_token_id"])
    prompt = PromptFormat(image_token_id=config.take("image_token_id"))
    return Architecture(
        name, vision, read_language(language), shuffle=_shuffle(config), tied=tied(config), prompt=prompt,
        types=("internvl", language["model_type"]),
    )  # fmt: skip


def read_original(name: str, config: Section) -> Architecture:
    """Read InternVL's config.json in its own repository's form. Raises UserError naming an unsupported field."""
    config.must(ps_version="v2", pad2square=False, use_backbone_lora=0, use_llm_lora=0)
    if config["ps_version"] != "v2":
        raise UserError(f"{config.where}.ps_version is missing, which means 'v1'; supported: 'v2'")
    tower, language = config.inner("vision_config", "intern_vit_6b"), config.inner("llm_config", "internlm2")
    tower.must(use_moe=False)
    layers, _ = layers_read(tower, config["select_layer"])
    steps = tower["num_hidden_layers"] - 1  # the share grows over all layers, whether they run or not
    drop_path = (tower.take_if("drop_path_rate", finite(0, 0.99)) or 0.0) * (layers - 1) / max(steps, 1)
    if config.get("force_image_size") not in (None, tower["image_size"]):
        raise UserError(f"{config.where}.force_image_size is not vision_config.image_size: positions would stretch")
    vision = VisionArchitecture(
        **vision_sizes(tower, layers),
        normalization=tower.choose("norm_type", NORMALIZATIONS),
        qkv_bias=tower.take("qkv_bias"),
        qk_norm=tower.take("qk_normalization"),
        drop_path=drop_path,
    )
    tower.refuse_unread()
    named = config.take_if("template", text) or ""
    later = LATER_TEMPLATES.get(language["model_type"])
    template = later if named == "internvl2_5" else ORIGINAL_TEMPLATES.get(named)
    prompt = PromptFormat(chat_template=template)
    return Architecture(
        name, vision, read_language(language), shuffle=_shuffle(config), prompt=prompt,
        tied=language.take("tie_word_embeddings"), types=("internvl_chat", language["model_type"]),
    )  # fmt: skip


def _shuffle(config: Section) -> int:
    ratio = config.take("downsample_ratio", finite(1 / 16, 1))
    factor = round(1 / ratio)
    if factor * ratio != 1:
        raise UserError(f"{config.where}.downsample_ratio is {ratio}; supported: 1, 0.5, 0.25")
    return factor
