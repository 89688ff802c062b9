"""Reads Hugging Face's config.json as an `Architecture`; what we cannot honour exactly is refused by name.

Known: `InternVLForConditionalGeneration`, `LlavaForConditionalGeneration`, `LlavaNextForConditionalGeneration`, and the
original InternVL (`InternVLChatModel`, whose code lives in its repository).
"""

import json
from pathlib import Path
from typing import Any

from omnibal_ext.architectures.architecture import (
    Architecture,
    LanguageArchitecture,
    PromptFormat,
    RopeScaling,
    VisionArchitecture,
)
from omnibal_ext.architectures.huggingface_section import Section, section
from omnibal_ext.errors import UserError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

NORMALIZATIONS = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}
ROPE_FIELDS = (
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
)  # fmt: skip
ORIGINAL_TEMPLATES = {"internlm2-chat": "internlm2-chat", "Hermes-2": "hermes-2"}
"""InternVL's own names of chat templates."""
LATER_TEMPLATES = {"internlm2": "internlm2-chat", "qwen2": "hermes-2", "qwen3": "hermes-2"}
"""Of its "internvl2_5", which begins as the tokenizer of the language model does, with `<s>` or without."""
GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
"""LLaVA-1.6's grids, rows and columns of tiles."""


def config_path(path: Path) -> Path:
    """The config.json that a path means: itself, in that folder, or in its folder "huggingface" (a converted model's).

    Raises UserError if there is none.
    """
    for candidate in (path, path / CONFIG, path / "huggingface" / CONFIG):
        if candidate.is_file():
            return candidate
    raise UserError(f"{path}: no {CONFIG} here; give a folder of Hugging Face's or one of tools/convert_checkpoint.py")


def read_config(path: Path) -> dict[str, Any]:
    """The content of a config.json. Raises UserError if it is not JSON."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: must be a JSON object")
    return config


def weight_files(folder: Path) -> dict[str, str]:
    """Name of every weight of a folder -> the safetensors file that holds it; empty where there are none."""
    if (folder / INDEX).is_file():
        weights: dict[str, str] = read_config(folder / INDEX)["weight_map"]
        return weights
    if not (folder / SINGLE_FILE).is_file():
        return {}
    with (folder / SINGLE_FILE).open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: SINGLE_FILE for name in header if name != "__metadata__"}


def read_architecture(path: Path) -> Architecture:
    """The model that a config.json (or the folder it is in) describes.

    Raises UserError naming the field that is missing, unknown, or cannot be honoured exactly.
    """
    path = config_path(path)
    values = read_config(path)
    config = section(str(path), values.get("model_type", ""), values)
    folder = path.resolve().parent
    name = (folder.parent if folder.name == "huggingface" else folder).name
    try:
        match config["model_type"]:
            case "internvl":
                model = _internvl(name, config)
            case "internvl_chat":
                model = _internvl_chat(name, config)
            case "llava" | "llava_next":
                model = _llava(name, config)
            case other:
                raise UserError(f"{path}: model type {other!r} is no vision-language model we know")
        config.refuse_unread()
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{path}: a field has the wrong type: {error}") from error
    return model


def _internvl(name: str, config: Section) -> Architecture:
    config.must(projector_hidden_act="gelu", vision_feature_select_strategy="default")
    tower, text = config.inner("vision_config", "internvl_vision"), config.inner("text_config", "qwen2")
    tower.must(use_absolute_position_embeddings=True, use_mask_token=False)
    if tower["use_qk_norm"]:
        tower.must(layer_norm_eps=1e-6)  # transformers' QK-norm has this one whatever the layers' is
    layers, whole = _layers_read(tower, config["vision_feature_layer"])
    vision = VisionArchitecture(
        **_vision_sizes(tower, layers),
        normalization=tower.choose("norm_type", NORMALIZATIONS),
        qkv_bias=tower["attention_bias"],
        qk_norm=tower["use_qk_norm"],
        final_norm=whole and not tower["use_mean_pooling"],
    )
    tower.refuse_unread()
    prompt = PromptFormat(image_token_id=config["image_token_id"])
    return Architecture(name, vision, _language(text), shuffle=_shuffle(config), tied=_tied(config), prompt=prompt)


def _internvl_chat(name: str, config: Section) -> Architecture:
    config.must(ps_version="v2", pad2square=False, use_backbone_lora=0, use_llm_lora=0)
    if config["ps_version"] != "v2":
        raise UserError(f"{config.where}.ps_version is missing, which means 'v1'; supported: 'v2'")
    tower, text = config.inner("vision_config", "intern_vit_6b"), config.inner("llm_config", "internlm2")
    tower.must(use_moe=False)
    layers, _ = _layers_read(tower, config["select_layer"])
    if config.get("force_image_size") not in (None, tower["image_size"]):
        raise UserError(f"{config.where}.force_image_size is not vision_config.image_size: positions would stretch")
    vision = VisionArchitecture(
        **_vision_sizes(tower, layers),
        normalization=tower.choose("norm_type", NORMALIZATIONS),
        qkv_bias=tower["qkv_bias"],
        qk_norm=tower["qk_normalization"],
    )
    tower.refuse_unread()
    named = config.get("template") or ""
    template = LATER_TEMPLATES.get(text["model_type"]) if named == "internvl2_5" else ORIGINAL_TEMPLATES.get(named)
    prompt = PromptFormat(chat_template=template)
    tied = text["tie_word_embeddings"]
    return Architecture(name, vision, _language(text), shuffle=_shuffle(config), tied=tied, prompt=prompt)


def _llava(name: str, config: Section) -> Architecture:
    config.must(projector_hidden_act="gelu")
    tower, text = config.inner("vision_config", "clip_vision_model"), config.inner("text_config", "llama")
    tower.must(model_type="clip_vision_model")
    layers, _ = _layers_read(tower, config["vision_feature_layer"])
    vision = VisionArchitecture(
        **_vision_sizes(tower, layers), patch_bias=False, pre_norm=True, layer_scale=False, pixels="clip"
    )
    tower.refuse_unread()
    newline = config["model_type"] == "llava_next"
    class_token = config.choose("vision_feature_select_strategy", {"default": False, "full": True})
    if newline:
        config.must(vision_feature_select_strategy="default", use_image_newline_parameter=True)
        grids = [[rows * vision.image_size, columns * vision.image_size] for rows, columns in GRIDS]
        if config["image_grid_pinpoints"] not in (None, grids):
            raise UserError(f"{config.where}.image_grid_pinpoints is not LLaVA-1.6's {grids}; no others are known")
    return Architecture(
        name,
        vision,
        _language(text),
        shuffle=1,
        projector_norm=False,
        projector_bias=config["multimodal_projector_bias"],
        class_token=class_token,
        newline=newline,
        tied=_tied(config),
        prompt=PromptFormat("llava", config["image_token_index"], tiling="anyres" if newline else "pad"),
    )


def _vision_sizes(tower: Section, layers: int) -> dict[str, Any]:
    tower.must(num_channels=3, attention_dropout=0.0, hidden_dropout_prob=0.0, projection_dropout=0.0, dropout=0.0)
    if tower.get("drop_path_rate"):
        raise UserError(
            f"{tower.where}.drop_path_rate is {tower['drop_path_rate']}: layers are never left out at random here; "
            "set it to 0.0, as InternVL's own fine-tuning does unless it is told otherwise"
        )
    return {
        "layers": layers,
        "hidden_size": tower["hidden_size"],
        "heads": tower["num_attention_heads"],
        "ffn_hidden_size": tower["intermediate_size"],
        "image_size": _side(tower, "image_size"),
        "patch_size": _side(tower, "patch_size"),
        "norm_epsilon": tower["layer_norm_eps"],
        "activation": tower.choose("hidden_act", {"gelu": "gelu", "quick_gelu": "quick_gelu"}),
    }


def _side(tower: Section, name: str) -> int:
    """A square's side, written as a number or as height and width."""
    value = tower[name]
    sides = set(value) if isinstance(value, list) else {value}
    if len(sides) != 1:
        raise UserError(f"{tower.where}.{name} is {value}; only squares are supported")
    return int(sides.pop())


def _layers_read(tower: Section, feature_layer: Any) -> tuple[int, bool]:
    """Layers that run for the features to be read, and whether these are the tower's last output."""
    layers = tower["num_hidden_layers"]
    if not isinstance(feature_layer, int):
        raise UserError(f"{tower.where}: features of several layers ({feature_layer}) are not supported")
    read = feature_layer if feature_layer >= 0 else layers + 1 + feature_layer
    if not 1 <= read <= layers:
        raise UserError(f"{tower.where}: feature layer {feature_layer} of {layers}; at least one layer must run")
    return read, feature_layer == -1


def _shuffle(config: Section) -> int:
    factor = round(1 / config["downsample_ratio"])
    if factor * config["downsample_ratio"] != 1:
        raise UserError(f"{config.where}.downsample_ratio is {config['downsample_ratio']}; supported: 1, 0.5, 0.25")
    return factor


def _tied(config: Section) -> bool:
    """As transformers decides: as the config says, unless the weights hold a head of their own."""
    names = weight_files(Path(config.where).parent)
    has_head = any(name.endswith("lm_head.weight") for name in names)
    tied = config["tie_word_embeddings"]
    if config["model_type"].startswith("llava"):
        tied = tied or config.inner("text_config", "llama")["tie_word_embeddings"]
    return bool(tied) and not has_head


def _language(text: Section) -> LanguageArchitecture:
    text.must(hidden_act="silu", mlp_bias=False, attention_dropout=0.0, pretraining_tp=1)
    kind, heads = text["model_type"], text["num_attention_heads"]
    if kind not in ("llama", "mistral", "qwen2", "qwen3", "internlm2"):
        raise UserError(f"{text.where}: model type {kind!r} is not supported as a language model")
    text.must(bias=False) if kind == "internlm2" else text.must(attention_bias=False)
    if set(text.get("layer_types") or ()) - {"full_attention"} and not text.get("use_sliding_window"):
        raise UserError(f"{text.where}.layer_types has others than 'full_attention'; supported: that alone")
    scaling, limit = _rope(text)
    window = text.get("sliding_window") if kind == "mistral" or text.get("use_sliding_window") else None
    language = LanguageArchitecture(
        layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        heads=heads,
        kv_heads=text["num_key_value_heads"] or heads,
        ffn_hidden_size=text["intermediate_size"],
        vocab_size=text["vocab_size"],
        rope_theta=float(text.get("rope_theta") or (text.get("rope_parameters") or {}).get("rope_theta") or 1e4),
        norm_epsilon=text["rms_norm_eps"],
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        head_size=None if text.get("head_dim") in (None, text["hidden_size"] // heads) else text["head_dim"],
        rope_scaling=scaling,
        max_positions=min(filter(None, (limit, window)), default=None),
    )
    text.refuse_unread()
    return language


def _rope(text: Section) -> tuple[RopeScaling | None, int | None]:
    """Scaling of the rotation, and the length up to which there is none (dynamic scaling starts behind it)."""
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{text.where}: partial rotation is not supported")
    if unknown := [name for name, value in rope.items() if value and name not in ROPE_FIELDS]:
        raise UserError(f"{text.where}: rotary field {unknown[0]!r} is not known here; known: {', '.join(ROPE_FIELDS)}")
    match kind:
        case "default":
            return None, None
        case "dynamic":
            return None, int(text["max_position_embeddings"])
        case "linear":
            return RopeScaling("linear", float(rope["factor"])), None
        case "llama3":
            return RopeScaling(
                "llama3",
                float(rope["factor"]),
                float(rope["low_freq_factor"]),
                float(rope["high_freq_factor"]),
                int(rope["original_max_position_embeddings"]),
            ), None
        case _:
            raise UserError(f"{text.where}: rope scaling {kind!r} is not supported; known: linear, dynamic, llama3")
