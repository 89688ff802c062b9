"""Published config.json files are read as the models they are; what cannot be honoured is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from omnibal_ext.architectures import LANGUAGE_MODELS, PRESETS, VISION_TOWERS, preset
from omnibal_ext.errors import UserError
from omnibal_ext.huggingface_defaults import DEFAULTS
from omnibal_ext.model_data import RopeScaling

# Fields as published, those that say nothing about the model left out.
INTERNVIT_6B = {
    "architectures": ["InternVisionModel"],
    "attention_dropout": 0.0,
    "drop_path_rate": 0.1,
    "dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_size": 3200,
    "image_size": 448,
    "intermediate_size": 12800,
    "layer_norm_eps": 1e-06,
    "model_type": "intern_vit_6b",
    "norm_type": "rms_norm",
    "num_attention_heads": 25,
    "num_channels": 3,
    "num_hidden_layers": 45,
    "patch_size": 14,
    "qk_normalization": True,
    "qkv_bias": False,
}
INTERNVL_CHAT = {
    "architectures": ["InternVLChatModel"],
    "model_type": "internvl_chat",
    "downsample_ratio": 0.5,
    "force_image_size": 448,
    "llm_config": {
        "architectures": ["InternLM2ForCausalLM"],
        "attn_implementation": "flash_attention_2",
        "bias": False,
        "hidden_act": "silu",
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "max_position_embeddings": 32768,
        "model_type": "internlm2",
        "num_attention_heads": 48,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 3.0, "type": "dynamic"},
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "vocab_size": 92553,
    },
    "ps_version": "v2",
    "select_layer": -1,
    "vision_config": INTERNVIT_6B,
}
LLAVA_1_5 = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "text_config": {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05, "vocab_size": 32064},
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
LLAVA_1_6_MISTRAL = {
    **LLAVA_1_5,
    "model_type": "llava_next",
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "text_config": {
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "vocab_size": 32064,
    },
}

INTERNVL_HF: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    "text_config": {"model_type": "qwen2"},
    "vision_config": {"model_type": "internvl_vision"},
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(config: dict[str, Any], where: str, value: Any) -> dict[str, Any]:
    """A copy with one field changed; `where` may name a section, "text_config.vocab_size"."""
    copy = json.loads(json.dumps(config))
    *section, field = where.split(".")
    (copy[section[0]] if section else copy)[field] = value
    return copy


@pytest.mark.parametrize(
    ("name", "config"),
    [("llava-1.5-7b", LLAVA_1_5), ("llava-1.6-mistral-7b", LLAVA_1_6_MISTRAL), ("internvl-chat-1.5", INTERNVL_CHAT)],
)
def test_a_published_config_is_the_preset(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    read, known = preset(str(write(tmp_path / name, config))), PRESETS[name]
    # Dynamic scaling of the rotation begins behind 32768 tokens: up to there the models are the same.
    expected = 32768 if name == "internvl-chat-1.5" else None
    assert read.language.max_positions == expected
    assert str(read).replace("max_positions=32768", "max_positions=None") == str(known)


def test_a_file_a_folder_and_a_converted_folder_are_the_same_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", LLAVA_1_5)
    (tmp_path / "ours").mkdir()
    converted = write(tmp_path / "ours" / "huggingface", LLAVA_1_5)
    models = {str(preset(str(path)).vision) for path in (folder, folder / "config.json", converted.parent)}
    assert len(models) == 1
    assert preset(str(converted.parent)).name == "ours"


@pytest.mark.parametrize(
    "kind", [kind for kind in DEFAULTS if kind not in ("internlm2", "intern_vit_6b", "internvl_chat")]
)
def test_what_a_config_leaves_out_is_what_transformers_fills_in(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(kind)
    for field, value in DEFAULTS[kind].items():
        if field in ("image_grid_pinpoints", "sliding_window", "num_key_value_heads"):  # filled in when asked for
            continue
        found = getattr(theirs, field)
        assert (list(found) if isinstance(found, tuple) else found) == value, field


@pytest.mark.parametrize(
    ("config", "where", "value", "message"),
    [
        (INTERNVL_CHAT, "vision_config.hidden_act", "swish", r"vision_config\.hidden_act is 'swish'"),
        (INTERNVL_CHAT, "vision_config.norm_type", "batch_norm", r"norm_type is 'batch_norm'"),
        (INTERNVL_CHAT, "vision_config.dropout", 0.1, r"vision_config\.dropout is 0\.1"),
        (INTERNVL_CHAT, "llm_config.bias", True, r"llm_config\.bias is True"),
        (INTERNVL_CHAT, "llm_config.hidden_act", "gelu", r"llm_config\.hidden_act is 'gelu'"),
        (INTERNVL_CHAT, "llm_config.rope_scaling", {"type": "yarn", "factor": 4.0}, r"rope scaling 'yarn'"),
        (INTERNVL_CHAT, "ps_version", "v1", r"ps_version is 'v1'"),
        (INTERNVL_CHAT, "force_image_size", 224, r"force_image_size is not"),
        (INTERNVL_CHAT, "downsample_ratio", 0.3, r"downsample_ratio is 0\.3"),
        (INTERNVL_CHAT, "select_layer", -46, r"feature layer -46 of 45"),
        (INTERNVL_HF, "vision_feature_select_strategy", "full", r"vision_feature_select_strategy is 'full'"),
        (INTERNVL_HF, "projector_hidden_act", "relu", r"projector_hidden_act is 'relu'"),
        (LLAVA_1_5, "vision_feature_layer", [-2, -5], r"several layers"),
        (LLAVA_1_5, "vision_config.model_type", "siglip_vision_model", r"'siglip_vision_model' is not supported"),
        (LLAVA_1_5, "text_config.model_type", "phi3", r"'phi3' is not supported"),
        (LLAVA_1_5, "text_config.mlp_bias", True, r"text_config\.mlp_bias is True"),
        (LLAVA_1_5, "text_config.hidden_size", "wide", r"a field has the wrong type"),
        (LLAVA_1_6_MISTRAL, "image_grid_pinpoints", [[336, 336]], r"image_grid_pinpoints is not"),
        (LLAVA_1_6_MISTRAL, "vision_config.image_size", [336, 224], r"only squares"),
        (LLAVA_1_5, "model_type", "blip", r"'blip' is not supported"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], where: str, value: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        preset(str(write(tmp_path / "model", changed(config, where, value))))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("pooled", "layer", "normed"), [(True, -1, False), (False, -1, True), (False, -2, False)])
def test_the_last_norm_is_read_where_the_tower_is_whole_and_not_pooled(
    tmp_path: Path, pooled: bool, layer: int, normed: bool
) -> None:
    config = changed(INTERNVL_HF, "vision_config.use_mean_pooling", pooled)
    config["vision_feature_layer"] = layer
    assert preset(str(write(tmp_path / "model", config))).vision.final_norm == normed


def test_a_sliding_window_limits_samples_instead(tmp_path: Path) -> None:
    config = changed(LLAVA_1_6_MISTRAL, "text_config.sliding_window", 4096)
    assert preset(str(write(tmp_path / "model", config))).language.max_positions == 4096


def test_llama3_scaling_is_read(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    config = changed(LLAVA_1_5, "text_config.rope_scaling", rope)
    assert preset(str(write(tmp_path / "model", config))).language.rope_scaling == RopeScaling("llama3", 8.0)


def test_no_config_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json here"):
        preset(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        preset(str(tmp_path))
    with pytest.raises(UserError, match="unknown preset 'nowhere/at-all'"):
        preset("nowhere/at-all")


def test_every_tower_and_language_model_has_whole_heads() -> None:
    for tower in VISION_TOWERS.values():
        assert tower.hidden_size % tower.heads == 0
    for language in LANGUAGE_MODELS.values():
        assert language.hidden_size % language.heads == language.heads % language.kv_heads == 0
