"""Reads Hugging Face's config.json as an `Architecture`; what we cannot honour exactly is refused by name.

Known: `InternVLForConditionalGeneration`, `LlavaForConditionalGeneration`, `LlavaNextForConditionalGeneration`,
`LlavaOnevisionForConditionalGeneration`, `Qwen2VLForConditionalGeneration`, `Qwen2_5_VLForConditionalGeneration`,
`Qwen3VLForConditionalGeneration`, `Qwen3VLMoeForConditionalGeneration`, `Qwen3_5ForConditionalGeneration`,
`Qwen3_5MoeForConditionalGeneration`, `Gemma3ForConditionalGeneration`, and the original InternVL (`InternVLChatModel`,
whose code lives in its repository).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnibal_ext.architectures.architecture import (
    Architecture,
    PromptFormat,
    VisionArchitecture,
)
from omnibal_ext.architectures.huggingface_gemma import gemma3
from omnibal_ext.architectures.huggingface_language import LAYERS, TOKEN, WORDS, read_language
from omnibal_ext.architectures.huggingface_qwen import qwen_vl
from omnibal_ext.architectures.huggingface_section import Section, whole_model
from omnibal_ext.architectures.huggingface_vision import vision_sizes
from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import anything, finite, flag, mapping, record, shown, text
from omnibal_ext.reading.document import read_json
from omnibal_ext.reading.files import is_plain_name
from omnibal_ext.reading.tensors import read_tensor_places

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
ADAPTER = "adapter_config.json"
"""Of peft, which applies the weights beside it to those of a base model."""
WITH_ADAPTERS = "tools/convert_checkpoint.py --from-hf MODEL --adapters FOLDER reads both"

NORMALIZATIONS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
ORIGINAL_TEMPLATES = {"internlm2-chat": "internlm2-chat", "Hermes-2": "hermes-2"}
"""InternVL's own names of chat templates."""
LATER_TEMPLATES = {"internlm2": "internlm2-chat", "qwen2": "hermes-2", "qwen3": "hermes-2", "qwen3_moe": "hermes-2"}
"""Of its "internvl2_5", which begins as the tokenizer of the language model does, with `<s>` or without."""
LLAVA_TEMPLATES = {32064: "vicuna", 128320: "llava-llama3"}
"""By the words of a Llama: Vicuna's and Llama 3's, with LLaVA's own."""
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""LLaVA-1.6's grids, rows and columns of tiles."""


def find_config(path: Path) -> Path | None:
    """The config.json that a path means: itself, in that folder, or in its "huggingface" (a converted model's)."""
    candidates = (path, path / CONFIG, path / "huggingface" / CONFIG)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def config_path(path: Path) -> Path:
    """The same; raises UserError if there is none."""
    if found := find_config(path):
        return found
    if (path / ADAPTER).exists():
        raise UserError(f"{path}: holds an adapter ({ADAPTER}) and no model; {WITH_ADAPTERS}")
    raise UserError(f"{path}: no {CONFIG} here; give a folder of Hugging Face's or one of tools/convert_checkpoint.py")


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json, or of another of the files beside it. Raises UserError if it is no JSON object."""
    return read_json(path, mapping(anything), "download it again")


def image_token_id(config: Mapping[str, Any]) -> Any:
    """What a config.json says of the token that stands for image features; None where it says nothing."""
    return config.get("image_token_id", config.get("image_token_index"))


def weight_files(folder: Path) -> dict[str, str]:
    """Name of every weight of a folder -> the safetensors file that holds it; empty where there are none."""
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX, record({"weight_map": mapping(weight_file)}), "download it again")
        weights: dict[str, str] = index["weight_map"]
        return weights
    if not (folder / SINGLE_FILE).exists():
        return {}
    return dict.fromkeys(read_tensor_places(folder / SINGLE_FILE), SINGLE_FILE)


def weight_file(place: str, value: Any) -> str:
    """The name of a safetensors file of the same folder; any other would lead out of it."""
    name = text(place, value)
    if not is_plain_name(name) or not name.endswith(".safetensors"):
        raise UserError(f"{place} must be the name of a .safetensors file in this folder, got {shown(name)}")
    return name


def read_architecture(path: Path) -> Architecture:
    """The model that a config.json (or the folder it is in) describes.

    Raises UserError naming all fields that are unknown or cannot be honoured exactly, up to one that is missing or
    without which nothing can be read on.
    """
    path = config_path(path)
    values = read_config(path)
    config = whole_model(str(path), values.get("model_type", ""), values)
    folder = path.resolve().parent
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{folder}: an adapter ({ADAPTER}) lies beside the model, and would not be applied as peft does; move it "
            f"to a folder of its own: {WITH_ADAPTERS}"
        )
    name = (folder.parent if folder.name == "huggingface" else folder).name
    try:
        model = _model(name, config)
        config.refuse_unread()
    except UserError as error:
        config.faults.append(str(error))
    if len(config.faults) > 1:
        all_of_them = "; ".join(fault.removeprefix(str(path)).lstrip(".: ") for fault in config.faults)
        raise UserError(f"{path}: {len(config.faults)} things are in the way: {all_of_them}")
    if config.faults:
        raise UserError(config.faults[0])
    return model


def _model(name: str, config: Section) -> Architecture:
    match config["model_type"]:
        case "internvl":
            return _internvl(name, config)
        case "internvl_chat":
            return _internvl_chat(name, config)
        case "llava" | "llava_next":
            return _llava(name, config)
        case "llava_onevision":
            return _llava_onevision(name, config)
        case "gemma3":
            return gemma3(name, config, _tied(config))
        case _:
            return qwen_vl(name, config, _tied(config))


def _internvl(name: str, config: Section) -> Architecture:
    config.must(projector_hidden_act="gelu", vision_feature_select_strategy="default")
    tower, language = config.inner("vision_config", "internvl_vision"), config.inner("text_config", "qwen2")
    tower.must(use_absolute_position_embeddings=True, use_mask_token=False)
    if tower.take("use_qk_norm", flag):
        tower.must(layer_norm_eps=1e-6)  # transformers' QK-norm has this one whatever the layers' is
    layers, is_last = _layers_read(tower, config["vision_feature_layer"])
    vision = VisionArchitecture(
        **vision_sizes(tower, layers),
        normalization=tower.choose("norm_type", NORMALIZATIONS),
        qkv_bias=tower.take("attention_bias", flag),
        qk_norm=tower.take("use_qk_norm", flag),
        final_norm=is_last and not tower.take("use_mean_pooling", flag),
    )
    tower.refuse_unread()
    prompt = PromptFormat(image_token_id=config.take("image_token_id", TOKEN))
    return Architecture(
        name, vision, read_language(language), shuffle=_shuffle(config), tied=_tied(config), prompt=prompt
    )


def _internvl_chat(name: str, config: Section) -> Architecture:
    config.must(ps_version="v2", pad2square=False, use_backbone_lora=0, use_llm_lora=0)
    if config["ps_version"] != "v2":
        raise UserError(f"{config.where}.ps_version is missing, which means 'v1'; supported: 'v2'")
    tower, language = config.inner("vision_config", "intern_vit_6b"), config.inner("llm_config", "internlm2")
    tower.must(use_moe=False)
    layers, _ = _layers_read(tower, config["select_layer"])
    steps = tower["num_hidden_layers"] - 1  # the share grows over all layers, whether they run or not
    drop_path = (tower.take_if("drop_path_rate", finite(0, 0.99)) or 0.0) * (layers - 1) / max(steps, 1)
    if config.get("force_image_size") not in (None, tower["image_size"]):
        raise UserError(f"{config.where}.force_image_size is not vision_config.image_size: positions would stretch")
    vision = VisionArchitecture(
        **vision_sizes(tower, layers),
        normalization=tower.choose("norm_type", NORMALIZATIONS),
        qkv_bias=tower.take("qkv_bias", flag),
        qk_norm=tower.take("qk_normalization", flag),
        drop_path=drop_path,
    )
    tower.refuse_unread()
    named = config.take_if("template", text) or ""
    later = LATER_TEMPLATES.get(language["model_type"])
    template = later if named == "internvl2_5" else ORIGINAL_TEMPLATES.get(named)
    prompt = PromptFormat(chat_template=template)
    tied = language.take("tie_word_embeddings", flag)
    return Architecture(name, vision, read_language(language), shuffle=_shuffle(config), tied=tied, prompt=prompt)


def _llava(name: str, config: Section) -> Architecture:
    config.must(projector_hidden_act="gelu")
    tower, language = config.inner("vision_config", "clip_vision_model"), config.inner("text_config", "llama")
    newline = config["model_type"] == "llava_next"
    if tower["model_type"] == "siglip_vision_model" and not newline:
        config.must(vision_feature_select_strategy="full")  # which takes every patch: there is no class token
        return _of_llava(name, config, _siglip(tower, config), language, None, "fixed")
    tower.must_be("clip_vision_model")
    layers, _ = _layers_read(tower, config["vision_feature_layer"])
    vision = VisionArchitecture(
        **vision_sizes(tower, layers), patch_bias=False, pre_norm=True, layer_scale=False, pixels="clip"
    )
    tower.refuse_unread()
    class_token = config.choose("vision_feature_select_strategy", {"default": False, "full": True})
    if newline:
        config.must(vision_feature_select_strategy="default", use_image_newline_parameter=True)
        grids = [[rows * vision.image_size, columns * vision.image_size] for rows, columns in GRIDS]
        if config["image_grid_pinpoints"] not in (None, grids):
            raise UserError(f"{config.where}.image_grid_pinpoints is not LLaVA-1.6's {grids}; no others are known")
    template, tiling = _llava_template(language), "anyres" if newline else "pad"
    return _of_llava(name, config, vision, language, template, tiling, class_token)


def _llava_onevision(name: str, config: Section) -> Architecture:
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
    layers, _ = _layers_read(tower, config["vision_feature_layer"])  # features are those in front of the last norm
    vision = VisionArchitecture(**vision_sizes(tower, layers), class_token=False, layer_scale=False, pixels="half")
    tower.refuse_unread()
    return vision


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
        projector_bias=config.take("multimodal_projector_bias", flag),
        class_token=class_token,
        newline=tiling not in ("pad", "fixed"),
        tied=_tied(config),
        prompt=PromptFormat("llava", config.take("image_token_index", TOKEN), template, tiling),
    )


def _llava_template(language: Section) -> str | None:
    """The template that a LLaVA was trained with; its processors write answers without their end."""
    if language["model_type"] == "mistral":
        return "mistral"
    return LLAVA_TEMPLATES.get(language.take("vocab_size", WORDS))


def _layers_read(tower: Section, feature_layer: Any) -> tuple[int, bool]:
    """Layers that run for the features to be read, and whether these are the tower's last output."""
    layers = tower.take("num_hidden_layers", LAYERS)
    if type(feature_layer) is not int:
        raise UserError(f"{tower.where}: features of several layers ({shown(feature_layer)}) are not supported")
    read = feature_layer if feature_layer >= 0 else layers + 1 + feature_layer
    if not 1 <= read <= layers:
        raise UserError(f"{tower.where}: feature layer {feature_layer} of {layers}; at least one layer must run")
    return read, feature_layer == -1


def _shuffle(config: Section) -> int:
    ratio = config.take("downsample_ratio", finite(1 / 16, 1))
    factor = round(1 / ratio)
    if factor * ratio != 1:
        raise UserError(f"{config.where}.downsample_ratio is {ratio}; supported: 1, 0.5, 0.25")
    return factor


def _tied(config: Section) -> bool:
    """As transformers decides: as the config says, unless the weights hold a head of their own."""
    names = weight_files(Path(config.where).parent)
    has_head = any(name.endswith("lm_head.weight") for name in names)
    tied = config.take("tie_word_embeddings", flag)
    if config["model_type"].startswith("qwen"):  # older files say it of the language model
        inner = config.take_if("text_config", mapping(anything)) or {}
        tied = tied or flag(f"{config.where}.text_config.tie_word_embeddings", inner.get("tie_word_embeddings", False))
    if config["model_type"].startswith("llava"):
        tied = tied or config.inner("text_config", "llama").take("tie_word_embeddings", flag)
    return tied and not has_head
