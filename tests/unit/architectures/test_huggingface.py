"""Published config.json files are read as the models they are; what cannot be honoured is refused by name."""

import json
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnibal_ext.architectures.architecture import differences
from omnibal_ext.architectures.huggingface import read_architecture, read_fields
from omnibal_ext.architectures.language import FarHeads, RopeScaling, SlidingWindow
from omnibal_ext.architectures.presets import PRESETS, preset
from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import FAMILIES, MODELS, PARTS

Fields = dict[str, Any]
DEFAULTS = {kind: part.defaults for kind, part in {**PARTS, **{kind: one.part for kind, one in MODELS.items()}}.items()}
OWN = {name: one.config for family in FAMILIES for name, one in family.presets.items()}
"""Of our presets, with no more than tells them from others of their family."""
LLAVA_1_6, ONEVISION, QWEN3_MOE, QWEN3_5 = (
    OWN[name] for name in ("llava-1.6-mistral-7b", "llava-onevision-7b", "qwen3-vl-30b-a3b", "qwen3.5-27b")
)
GEMMA_4_E2B, GEMMA_4_MOE, GEMMA_4_12B, PALIGEMMA_2, INTERNVL_MOE = (
    OWN[name] for name in ("gemma-4-e2b", "gemma-4-26b-a4b", "gemma-4-12b", "paligemma2-28b-448", "internvl3.5-30b-a3b")
)
# Fields as published, those that say nothing about the model left out.
INTERNVIT_6B = {
    "architectures": ["InternVisionModel"], "attention_dropout": 0.0, "drop_path_rate": 0.0, "dropout": 0.0,
    "hidden_act": "gelu", "hidden_size": 3200, "image_size": 448, "intermediate_size": 12800, "layer_norm_eps": 1e-06,
    "model_type": "intern_vit_6b", "norm_type": "rms_norm", "num_attention_heads": 25, "num_channels": 3,
    "num_hidden_layers": 45, "patch_size": 14, "qk_normalization": True, "qkv_bias": False,
}  # fmt: skip
INTERNVL_CHAT = {
    "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "downsample_ratio": 0.5,
    "force_image_size": 448,
    "llm_config": {
        "architectures": ["InternLM2ForCausalLM"], "attn_implementation": "flash_attention_2", "bias": False,
        "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 16384, "max_position_embeddings": 32768,
        "model_type": "internlm2", "num_attention_heads": 48, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 3.0, "type": "dynamic"}, "rope_theta": 1000000,
        "tie_word_embeddings": False, "vocab_size": 92553,
    },
    "ps_version": "v2",
    "select_layer": -1,
    "vision_config": INTERNVIT_6B,
}  # fmt: skip
LLAVA_1_5 = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "text_config": {"max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05, "vocab_size": 32064},
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}  # fmt: skip
QWEN2_5_VL = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 3584, "image_token_id": 151655, "intermediate_size": 18944,
    "max_position_embeddings": 128000, "max_window_layers": 28, "model_type": "qwen2_5_vl", "num_attention_heads": 28,
    "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "sliding_window": 32768,
    "tie_word_embeddings": False, "use_sliding_window": False, "video_token_id": 151656,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2, "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653, "vision_start_token_id": 151652, "vision_token_id": 151654, "vocab_size": 152064,
}  # fmt: skip
QWEN3_VL: Fields = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": 151655, "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 12288, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
    },
    "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "video_token_id": 151656,
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_vl",
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653, "vision_start_token_id": 151652,
}  # fmt: skip
QWEN3_5_MOE: Fields = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": 248056, "model_type": "qwen3_5_moe",
    "text_config": {
        "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
        "mlp_only_layers": [], "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 16,
        "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
            "rope_theta": 10000000, "rope_type": "default",
        },
        "use_cache": True, "vocab_size": 248320,
    },
    "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "video_token_id": 248057,
    "vision_config": {
        **QWEN3_VL["vision_config"], "deepstack_visual_indexes": [], "model_type": "qwen3_5_moe",
        "out_hidden_size": 2048,
    },
    "vision_end_token_id": 248054, "vision_start_token_id": 248053,
}  # fmt: skip
INTERNVL_HF: Fields = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    "text_config": {"model_type": "qwen2"},
    "vision_config": {"model_type": "internvl_vision"},
}
GEMMA_3 = {
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
        "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16, "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    },
}  # fmt: skip


PALIGEMMA = {
    "_vocab_size": 257152, "architectures": ["PaliGemmaForConditionalGeneration"], "bos_token_id": 2, "eos_token_id": 1,
    "hidden_size": 2048, "ignore_index": -100, "image_token_index": 257152, "model_type": "paligemma",
    "pad_token_id": 0, "projection_dim": 2048,
    "text_config": {
        "hidden_size": 2048, "intermediate_size": 16384, "model_type": "gemma", "num_attention_heads": 8,
        "num_hidden_layers": 18, "num_image_tokens": 1024, "num_key_value_heads": 1, "torch_dtype": "float32",
        "vocab_size": 257216,
    },
    "torch_dtype": "float32",
    "vision_config": {
        "hidden_size": 1152, "image_size": 448, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "num_image_tokens": 1024, "patch_size": 14,
        "projection_dim": 2048, "projector_hidden_act": "gelu_fast", "vision_use_head": False,
    },
}  # fmt: skip
GEMMA_4 = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "boi_token_id": 255999,
    "eoi_token_id": 258882, "image_token_id": 258880, "model_type": "gemma4",
    "text_config": {
        "attention_k_eq_v": True, "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376,
        "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "model_type": "gemma4_text",
        "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        "head_dim": 72, "hidden_size": 1152, "intermediate_size": 4304, "model_type": "gemma4_vision",
        "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": True,
        "use_clipped_linears": False,
    },
}  # fmt: skip
# From memory: the language model's fields on the top level, the ViT's section under the model's own type.
PADDLEOCR_VL = {
    "architectures": ["PaddleOCRVLForConditionalGeneration"], "compression_ratio": 1.0, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "ignored_index": -100, "image_token_id": 100295,
    "intermediate_size": 3072, "max_position_embeddings": 131072, "model_type": "paddleocr_vl",
    "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2, "rms_norm_eps": 1e-05,
    "rope_is_neox_style": True, "rope_theta": 500000, "use_3d_rope": True, "use_bias": False,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "vocab_size": 103424, "weight_share_add_bias": True,
    "vision_config": {
        "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "layer_norm_eps": 1e-06,
        "model_type": "paddleocr_vl", "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 27,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "tokens_per_second": 2,
    },
}  # fmt: skip


def write(folder: Path, config: Fields) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(config: Fields, where: str, value: Any) -> Fields:
    """A copy with one field changed; `where` may name a section, "text_config.vocab_size"."""
    copy = json.loads(json.dumps(config))
    *section, field = where.split(".")
    (copy[section[0]] if section else copy)[field] = value
    return copy


def read(folder: Path, config: Fields, name: str = "model") -> Any:
    return preset(str(write(folder / name, config)))


def with_fields_twice(config: Fields) -> Fields:
    """As transformers 4.52 to 4.55 saved Qwen2-VL and Qwen2.5-VL."""
    outer = ("architectures", "vision_config", "model_type", "transformers_version")
    text = {name: value for name, value in config.items() if name not in outer}
    text |= {"model_type": f"{config['model_type']}_text", "sliding_window": None, "image_token_id": None}
    text["rope_scaling"] = {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}
    return {**config, "text_config": text, "transformers_version": "4.53.1"}


def test_a_folder_that_is_called_like_a_preset_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert preset("tiny") == PRESETS["tiny"], "a folder of something else"
    write(tmp_path / "tiny", LLAVA_1_5)
    assert preset("tiny").language != PRESETS["tiny"].language


def test_fields_that_came_later_leave_the_hash_of_others_alone() -> None:
    """Profiles, plans and runs of a model are told by it: `internvl-chat-1.5` had this one before there were any."""
    assert PRESETS["internvl-chat-1.5"].hash == "2a456a76ad508e21"
    one = PRESETS["vip-llava-7b"]
    other = replace(one, vision=replace(one.vision, side_by_side=(0, 1, 2, 3, 4)))
    assert one.hash != other.hash


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llava-1.5-7b", LLAVA_1_5), ("internvl-chat-1.5", INTERNVL_CHAT), ("qwen2.5-vl-7b", QWEN2_5_VL),
        ("qwen3-vl-8b", QWEN3_VL), ("qwen3.5-35b-a3b", QWEN3_5_MOE), ("gemma-3-27b", GEMMA_3),
        ("gemma-4-31b", GEMMA_4), ("paligemma-3b-448", PALIGEMMA), ("paddleocr-vl", PADDLEOCR_VL),
    ],
)  # fmt: skip
def test_a_published_config_is_the_preset(tmp_path: Path, name: str, config: Fields) -> None:
    read, known = preset(str(write(tmp_path / name, config))), PRESETS[name]
    # Dynamic scaling of the rotation begins behind 32768 tokens: up to there the models are the same.
    if name == "internvl-chat-1.5":
        assert read.language.rope_scaling == RopeScaling("dynamic", 3.0, original_positions=32768)
        assert not [name for name, *_ in differences(read, known) if "rope" in name]
        read = replace(read, language=replace(read.language, rope_scaling=None))
    # No LLaVA folder names its chat template, and no InternVL folder of the first kind its image token.
    prompt = {**asdict(read.prompt), "chat_template": known.prompt.chat_template}
    assert prompt == asdict(known.prompt) | ({"image_token_id": None} if "internvl" in name else {})
    read = replace(read, prompt=known.prompt)
    assert str(read) == str(known)


def test_drop_path_grows_over_all_layers_also_those_that_do_not_run(tmp_path: Path) -> None:
    """InternVL's own code: from 0 to drop_path_rate over all layers, of which `select_layer` leaves some out."""
    config = changed(changed(INTERNVL_CHAT, "vision_config.drop_path_rate", 0.44), "select_layer", -12)
    vision = read(tmp_path, config).vision
    assert vision.layers == INTERNVIT_6B["num_hidden_layers"] - 11
    assert vision.drop_path == pytest.approx(0.44 * (vision.layers - 1) / (INTERNVIT_6B["num_hidden_layers"] - 1))


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
    theirs.allow_global_per_layer_attribute_access = True  # where layers differ, those that are not named apart
    for field, value in DEFAULTS[kind].items():
        if field in ("image_grid_pinpoints", "sliding_window", "num_key_value_heads"):  # filled in when asked for
            continue
        found = getattr(theirs, field)
        if hasattr(found, "to_dict"):  # a section
            found = {name: getattr(found, name) for name in value}
        assert (list(found) if isinstance(found, tuple) else found) == value, field


TWICE = with_fields_twice(QWEN2_5_VL)


@pytest.mark.parametrize(
    ("config", "where", "value", "message"),
    [
        (INTERNVL_CHAT, "vision_config.hidden_act", "swish", r"vision_config\.hidden_act is 'swish'"),
        (INTERNVL_CHAT, "llm_config.bias", True, r"llm_config\.bias is True"),
        (INTERNVL_CHAT, "llm_config.rope_scaling", {"type": "longrope", "factor": 4.0}, r"rope scaling 'longrope'"),
        (INTERNVL_CHAT, "llm_config.rope_scaling", {"type": "yarn", "factor": 4.0}, r"yarn rope scaling.*original_max"),
        (INTERNVL_CHAT, "ps_version", "v1", r"ps_version is 'v1'"),
        (INTERNVL_CHAT, "force_image_size", 224, r"force_image_size is not"),
        (INTERNVL_CHAT, "downsample_ratio", 0.3, r"downsample_ratio is 0\.3"),
        (INTERNVL_CHAT, "select_layer", -46, r"feature layer -46 of 45"),
        (INTERNVL_HF, "vision_feature_select_strategy", "full", r"vision_feature_select_strategy is 'full'"),
        (LLAVA_1_5, "vision_feature_layer", [-2, 0], r"feature layer 0 of 24; at least one layer must run"),
        (LLAVA_1_5, "vision_config.model_type", "siglip_vision_model", r"select_strategy is 'default'; supported: 'fu"),
        (LLAVA_1_5, "text_config.model_type", "phi3", r"'phi3' is not supported"),
        (LLAVA_1_5, "text_config.hidden_size", "wide", r"hidden_size must be a whole number .*, got 'wide'"),
        (LLAVA_1_6, "image_grid_pinpoints", [[336, 336]], r"image_grid_pinpoints is not"),
        (LLAVA_1_6, "vision_config.image_size", [336, 224], r"only squares"),
        (INTERNVL_CHAT, "vision_config.drop_path_rate", 1.0, r"vision_config\.drop_path_rate must be .*, got 1\.0"),
        (INTERNVL_HF, "vision_config.drop_path_rate", 0.1, r"drop_path_rate is '0\.1', which is not known"),
        (INTERNVL_CHAT, "use_llm_lora", 16, r"use_llm_lora is 16"),
        (INTERNVL_CHAT, "vision_config.patch_size", 15, r"image size 448 is no multiple of patch size 15"),
        (LLAVA_1_5, "mm_hidden_size", 1024, r"mm_hidden_size is '1024', which is not known here; remove it"),
        (LLAVA_1_5, "text_config.layer_types", ["full_attention", "sliding_attention"], r"layer_types has others"),
        (LLAVA_1_5, "text_config.rope_scaling", {"type": "linear", "factor": 2.0, "mrope_section": [1]}, "mrope_sec"),
        (QWEN3_5, "text_config.attn_output_gate", False, r"attn_output_gate is False; supported: True"),
        (QWEN3_5, "text_config.num_key_value_heads", 5, r"24 heads are no multiple of 5 of keys and values"),
        (QWEN3_5, "text_config.linear_num_key_heads", 9, r"48 heads of values are no multiple of 9 of keys"),
        (QWEN3_5, "text_config.layer_types", ["linear_attention"] * 64, r"has no 'full_attention'; supported"),
        (QWEN3_5, "text_config.layer_types", ["full_attention"] * 3, r"'full_attention' for each layer"),
        (QWEN3_5, "text_config.full_attention_interval", 0, r"full_attention_interval must be a whole number from 1"),
        (QWEN3_5, "text_config.partial_rotary_factor", 1.5, r"partial_rotary_factor must be a number from 0 to 1"),
        (QWEN3_5, "text_config.rope_parameters", {"partial_rotary_factor": 0.5}, r"not sum to half of a head's 128"),
        (QWEN3_5, "text_config.head_dim", 4, r"rotates 1 of a head's 4 dimensions"),
        (QWEN2_5_VL, "vision_config.window_size", 100, r"window_size is 100; supported: multiples of 28"),
        (QWEN2_5_VL, "vision_config.spatial_merge_size", 3, r"spatial_merge_size is 3"),
        (QWEN2_5_VL, "vision_config.out_hidden_size", 99, r"output is 99 wide, .* hidden_size is 3584"),
        (QWEN3_VL, "vision_config.deepstack_visual_indexes", [16, 8], r"layers \[16, 8\]; supported: ascending"),
        (QWEN3_VL, "vision_config.num_position_embeddings", 2305, r"num_position_embeddings is 2305"),
        (QWEN3_VL, "text_config.rope_scaling", {"mrope_interleaved": False}, r"mrope_interleaved is False"),
        (QWEN3_MOE, "text_config.mlp_only_layers", [0], r"mlp_only_layers is \[0\]; supported: \[\]"),
        (QWEN3_MOE, "text_config.norm_topk_prob", False, r"norm_topk_prob is False; supported: True"),
        (QWEN3_MOE, "text_config.num_experts_per_tok", 1, r"experts_per_tok is 1; supported: 2 up to the 128"),
        (INTERNVL_MOE, "text_config.num_experts_per_tok", 129, r"experts_per_tok is 129; supported: 2 up to"),
        (INTERNVL_MOE, "text_config.num_experts", 0, r"num_experts must be"),
        (ONEVISION, "vision_aspect_ratio", "anyres_max_4", r"vision_aspect_ratio is 'anyres_max_4'"),
        (ONEVISION, "vision_config.model_type", "clip_vision_model", r"model_type is 'clip_vision_model'"),
        (QWEN2_5_VL, "quantization_config", {"bits": 4}, r"weights are quantised \('of an unknown method'\)"),
        (LLAVA_1_5, "text_config.quantization_config", {"quant_method": "fp8"}, r"text_config.*quantised \('fp8'\)"),
        (LLAVA_1_5, "model_type", "llama", r"'llama' is not supported; known: internvl, [^']*; docs/families\.md says"),
        (LLAVA_1_5, "model_type", "clip_vision_model", r"not supported; known: (?!.*clip_vision_model)"),
        (LLAVA_1_6, "use_image_newline_parameter", False, r"use_image_newline_parameter is False"),
        (GEMMA_4_MOE, "text_config.num_experts", None, r"num_experts must be"),
        (GEMMA_4, "vision_config.num_key_value_heads", 4, r"num_key_value_heads is 4; supported: 16"),
        (GEMMA_4, "vision_config.head_dim", 64, r"head_dim is 64; supported: 72"),
        (GEMMA_4, "vision_config.num_attention_heads", 5, r"1152 does not divide into 5 heads"),
        (GEMMA_4, "vision_config.rope_parameters", {"rope_type": "yarn"}, r"rope type 'yarn'; supported"),
        (GEMMA_4, "text_config.model_type", "gemma3_text", r"model_type is 'gemma3_text'; supported: 'gemma4_text'"),
        (GEMMA_4_E2B, "text_config.vocab_size_per_layer_input", 262143, r"is 262143 and pad_token_id 0; supported"),
        (GEMMA_4_E2B, "text_config.pad_token_id", None, r"pad_token_id None; supported: all 262144 words"),
        (GEMMA_4_E2B, "text_config.num_kv_shared_layers", 31, r"is 31 of 35; supported: numbers that leave a layer"),
        (GEMMA_4, "text_config.use_bidirectional_attention", "all", r"'all'; supported: 'vision', null"),
        (GEMMA_4, "text_config.num_global_key_value_heads", 5, r"32 heads of width 512 and 5 of keys"),
        (GEMMA_4, "text_config.layer_types", ["full_attention"] * 60, r"no 'sliding_attention' before the last layer"),
        (GEMMA_4, "text_config.per_layer_config", {"0": {"head_dim": 64}}, r"per_layer_config: supported: the same in"),
        (GEMMA_4, "text_config.rope_parameters", {"rope_theta": 1e4}, r"rope_theta is needed for 'sliding_attention'"),
        (GEMMA_4_12B, "vision_config.model_type", "gemma4_vision", r"'gemma4_vision'; supported: 'gemma4_unif"),
        (GEMMA_4_12B, "vision_config.model_patch_size", 32, r"model_patch_size is 32; supported: 48"),
        (GEMMA_4_12B, "vision_config.output_proj_dims", 1152, r"output_proj_dims is 1152; supported: 3840"),
        (GEMMA_4_12B, "text_config.enable_moe_block", True, r"enable_moe_block is True; supported: 0, or none"),
        (GEMMA_4_12B, "text_config.num_kv_shared_layers", 20, r"num_kv_shared_layers is 20; supported: 0"),
        (GEMMA_3, "mm_tokens_per_image", 100, r"mm_tokens_per_image is 100; supported: squares of a number that"),
        (GEMMA_3, "text_config.final_logit_softcapping", 30.0, r"final_logit_softcapping is 30\.0"),
        (GEMMA_3, "text_config.layer_types", ["full_attention"], r"layer_types are \['full_attention'\]; supported"),
        (GEMMA_3, "text_config.sliding_window", None, r"sliding_window must be"),
        (GEMMA_3, "text_config.num_key_value_heads", 5, r"32 heads are no multiple of 5 of keys"),
        (GEMMA_3, "text_config.rope_scaling", {"rope_type": "yarn", "factor": 4.0}, r"full_attention has rope type"),
        (GEMMA_3, "text_config.rope_parameters", {"sliding_attention": {"rope_type": "linear", "factor": 4.0}},
         r"sliding_attention has rope type 'linear'; supported: default"),
        (GEMMA_3, "text_config.rope_parameters", {"rope_theta": 1e4}, r"rope_parameters has 'rope_theta'"),
        (PADDLEOCR_VL, "use_bias", True, r"text_config\.use_bias is True; supported: False"),
        (PADDLEOCR_VL, "text_config", {"head_dim": 96}, r"mrope_section \[16, 24, 24\] is not half of a head"),
        (PADDLEOCR_VL, "rope_scaling", {"mrope_section": [16, 24, 25]}, r"\[16, 24, 25\] is not half of a head"),
        (PADDLEOCR_VL, "vision_config.spatial_merge_size", 3, r"spatial_merge_size is 3; supported: 2"),
        (PADDLEOCR_VL, "vision_config.model_type", "siglip_vision_model", r"'siglip_vision_model'; supported: 'paddle"),
        (PALIGEMMA, "projection_dim", 1024, r"projection_dim is 1024; supported: 2048"),
        (PALIGEMMA, "text_config", None, r"text_config is missing"),
        (PALIGEMMA, "vision_config", {}, r"vision_config is missing"),
        (PALIGEMMA, "vision_config.model_type", "clip_vision_model", r"model_type is 'clip_vision_model'"),
        (PALIGEMMA, "text_config.rope_scaling", {"rope_type": "linear", "factor": 2.0}, r"rope scaling .*: none"),
        (PALIGEMMA_2, "text_config.layer_types", ["full_attention"], r"layer_types are \['full_attention'\]; supp"),
        (PALIGEMMA_2, "text_config.attn_logit_softcapping", 0, r"attn_logit_softcapping must be"),
        (
            {**INTERNVL_CHAT, "force_image_size": None}, "vision_config.image_size", 238,
            r"17 x 17 patches .*image size 238, patch size 14.* 2 x 2",
        ),
        # Two bases of rotation: versions of transformers differ in which of them they take.
        *((LLAVA_1_5, "text_config", {**LLAVA_1_5["text_config"], **rotation}, message) for rotation, message in (
            ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e6}}, "rope_theta is 10000, but .* 5e"),
            ({"rope_theta": 1e4, "rope_scaling": {"rope_theta": 5e6}}, "rope_theta is 10000, but .* 5e"),
            ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5e6}},
             "rope_parameters.rope_theta is 5e.*, but .* 10000"),
        )),
        # Fields that are written twice and differ.
        (TWICE, "hidden_act", "gelu", "hidden_act is 'gelu'"),
        (TWICE, "intermediate_size", 18945, "size is 18944 in text_config, which counts, and 18945 beside it"),
        (TWICE, "rope_theta", 2e6, "rope_theta is 1e.06 in text_config|rope_theta is 1000000.0 in text_config"),
        (TWICE, "num_experts", 4, "num_experts is '4', which is not known"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, config: Fields, where: str, value: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        read(tmp_path, changed(config, where, value))
    assert "\n" not in str(refusal.value)


def test_all_that_is_in_the_way_is_said_at_once(tmp_path: Path) -> None:
    """In one line, once each, whichever section it is in; what cannot be read on comes last."""
    text = {**QWEN2_5_VL, "attention_dropout": 0.1, "residual_scale": 2.0, "layer_types": ["chunked"], "emb_scale": 3}
    config = {**text, "fp8": True, "rope_scaling": {"mrope_section": [8, 8, 8], "partial_rotary_factor": 0.5, "a": 1}}
    config["vision_config"] = {**QWEN2_5_VL["vision_config"], "in_chans": 1, "hidden_act": "relu"}
    with pytest.raises(UserError) as refusal:
        read(tmp_path, config)
    said = str(refusal.value)
    named = (
        "attention_dropout is 0.1", "residual_scale is '2.0'", "layer_types has others", "emb_scale is '3'", "fp8 is",
        "[8, 8, 8] is not half", "partial rotation", "rotary field 'a'", "in_chans is 1", "hidden_act is 'relu'",
    )  # fmt: skip
    assert f"{len(named)} things are in the way" in said
    assert [said.count(one) for one in named] == [1] * len(named)
    assert said.count(str(tmp_path)) == 1
    assert "\n" not in said


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "fields", "of", "wanted"),
    [
        # The last norm, where the tower is whole and not pooled.
        *((INTERNVL_HF, {"vision_config.use_mean_pooling": pooled, "vision_feature_layer": layer}, "vision.final_norm",
           normed) for pooled, layer, normed in ((True, -1, False), (False, -1, True), (False, -2, False))),
        (LLAVA_1_6, {"text_config.sliding_window": 4096}, "language.max_positions", 4096),
        (GEMMA_3, {"text_config.layer_types": ["full_attention"] * 62}, "language.sliding", None),
        (LLAVA_1_5, {"text_config.rope_scaling": LLAMA3}, "language.rope_scaling", RopeScaling("llama3", 8.0)),
        # The images' token may be the first.
        (INTERNVL_HF, {"image_token_id": 0}, "prompt.image_token_id", 0),
        (LLAVA_1_5, {"image_token_index": 0}, "prompt.image_token_id", 0),
        (GEMMA_3, {"image_token_index": 0}, "prompt.image_token_id", 0),
    ],
)  # fmt: skip
def test_fields_are_read(tmp_path: Path, config: Fields, fields: Fields, of: str, wanted: Any) -> None:
    for where, value in fields.items():
        config = changed(config, where, value)
    assert attrgetter(of)(read(tmp_path, config)) == wanted


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"max_window_layers": 28}, None),  # of 28 layers
        ({"max_window_layers": 27}, 4096),
        ({}, None),  # 80, unless the file says otherwise
        ({"num_hidden_layers": 81}, 4096),
        ({"max_window_layers": 0, "layer_types": ["full_attention"] * 28}, None),
        ({"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, 4096),
        ({"max_window_layers": 0, "use_sliding_window": False}, None),
    ],
)
def test_a_window_that_no_layer_uses_limits_nothing(tmp_path: Path, fields: Fields, window: int | None) -> None:
    pytest.importorskip("transformers")
    from transformers import Qwen2_5_VLConfig

    text = {"num_hidden_layers": 28, "sliding_window": 4096, "use_sliding_window": True, **fields}
    assert ("sliding_attention" in Qwen2_5_VLConfig(text_config=text).text_config.layer_types) == (window is not None)
    plain = {name: value for name, value in QWEN2_5_VL.items() if name not in text and name != "max_window_layers"}
    assert read(tmp_path, {**plain, **text}).language.max_positions == window


def test_heads_of_gemmas_global_layers_are_read_in_both_spellings(tmp_path: Path) -> None:
    """Published files say them once, transformers writes them layer by layer; the last layer is always global."""
    own = {"head_dim": 512, "num_key_value_heads": 4}
    text = {
        k: v for k, v in GEMMA_4["text_config"].items() if k not in ("global_head_dim", "num_global_key_value_heads")
    }
    by_layer = {**text, "per_layer_config": {str(layer): own for layer in range(5, 60, 6)}}
    by_layer["layer_types"] = [*by_layer["layer_types"][:-1], "sliding_attention"]
    written = read(tmp_path, {**GEMMA_4, "text_config": by_layer})
    assert written.language == preset("gemma-4-31b").language
    alone = changed(GEMMA_4, "text_config.attention_k_eq_v", False)
    language = read(tmp_path, alone).language
    assert language.far == FarHeads(16, 512, keys_are_values=False), (
        "as transformers: fewer groups where they are values"
    )


def test_adapters_are_said_to_be_such(tmp_path: Path) -> None:
    file = write(tmp_path / "model", LLAVA_1_5)
    folder = file if file.is_dir() else file.parent
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model: an adapter \(adapter_config\.json\) lies beside the model"):
        preset(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"model: holds an adapter \(adapter_config\.json\) and no model"):
        read_architecture(folder)


def test_rotation_of_gemmas_two_kinds_of_layers_is_read_in_both_spellings(tmp_path: Path) -> None:
    old = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    new = {"full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 4.0}}
    new |= {"sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}
    for text in (old, {"rope_parameters": new}):
        plain = {name: value for name, value in GEMMA_3["text_config"].items() if name != "rope_scaling"}
        plain |= {"num_hidden_layers": 5, "sliding_window_pattern": 2, **text}
        language = read(tmp_path, {**GEMMA_3, "text_config": plain}).language
        assert (language.rope_theta, language.rope_scaling) == (2e6, RopeScaling("linear", 4.0))
        assert language.sliding == SlidingWindow(1024, (0, 2, 4), 3e4)


ROTATIONS: list[Fields] = [
    {"rope_scaling": {"rope_type": "default", "rope_theta": 5e6}},
    {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    {"rope_theta": 5e6, "rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
    {"rope_theta": 5e6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
    {},
]


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize(("config", "kind"), [(LLAVA_1_5, "llama"), (QWEN3_VL, "qwen3_vl_text")])
def test_the_base_of_rotation_is_taken_from_where_transformers_takes_it(
    tmp_path: Path, config: Fields, kind: str, rotation: Fields
) -> None:
    transformers = pytest.importorskip("transformers")
    if kind != "llama" and rotation.get("rope_scaling", {"type": "default"}):
        rotation = {**rotation, "rope_scaling": {"mrope_section": [24, 20, 20], "rope_theta": 5e6}}
    text = {name: value for name, value in config["text_config"].items() if not name.startswith("rope_")}
    folder = write(tmp_path / "model", {**config, "text_config": {**text, **rotation}})
    theirs = transformers.AutoConfig.from_pretrained(folder).text_config.rope_parameters
    assert preset(str(folder)).language.rope_theta == theirs["rope_theta"]


@pytest.mark.parametrize("config", [INTERNVL_CHAT, LLAVA_1_5, QWEN2_5_VL, GEMMA_4, PALIGEMMA])
def test_who_saved_a_config_says_nothing(tmp_path: Path, config: Fields) -> None:
    saved = {"unsloth_fixed": True, "unsloth_version": "2026.4.2", "transformers.js_config": {"dtype": "q4"}}
    inner = {name: {**part, **saved} for name, part in config.items() if name in ("text_config", "vision_config")}
    read = preset(str(write(tmp_path / "one", {**config, **saved, **inner})))
    assert replace(read, name="one") == replace(preset(str(write(tmp_path / "other", config))), name="one")


@pytest.mark.parametrize(
    "config", [{**QWEN2_5_VL, "model_type": "qwen2_vl", "vision_config": {"hidden_size": 3584}}, QWEN2_5_VL]
)
def test_fields_written_twice_are_read_once(tmp_path: Path, config: Fields) -> None:
    once, twice = (write(tmp_path / name, each) for name, each in (("a", config), ("b", with_fields_twice(config))))
    one, other = preset(str(once)), preset(str(twice))
    assert replace(one, name="") == replace(other, name="")


def test_no_config_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json here"):
        preset(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        preset(str(tmp_path))
    with pytest.raises(UserError, match=r"nowhere/at-all: no such folder; .*`hf download nowhere/at-all"):
        preset("nowhere/at-all")


def test_a_preset_is_its_config_whatever_files_are_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a head of its own, and GLM-4.6V's processor, in the working directory; a folder obeys both."""
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"lm_head.weight": np.zeros((2, 2))}, tmp_path / "model.safetensors")
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Glm46VProcessor"}')
    monkeypatch.chdir(tmp_path)
    gemma, glm = (read_fields(name, OWN[name], name) for name in ("gemma-3-4b", "glm-4.5v"))
    assert gemma == PRESETS["gemma-3-4b"]
    assert gemma.tied
    assert glm == PRESETS["glm-4.5v"]
    gemma, glm = (read_fields(name, OWN[name], name, tmp_path) for name in ("gemma-3-4b", "glm-4.5v"))
    assert not gemma.tied
    assert glm.prompt.image_markup == "glm-4.6v"


# What the published files hold beside: dumps of all settings by older transformers, and what belongs to data and tools.
def test_a_published_omni_is_read_as_its_preset() -> None:
    """The fields of Qwen3-Omni-30B-A3B's file that others do not have."""
    words = {
        "model_type": "qwen3_omni_moe_text", "attention_bias": False, "head_dim": 128, "hidden_size": 2048,
        "intermediate_size": 768, "max_position_embeddings": 65536, "mlp_only_layers": [], "num_attention_heads": 32,
        "num_experts": 128, "num_hidden_layers": 48, "num_key_value_heads": 4, "pruned_heads": {},
        "rope_scaling": {
            "interleaved": True, "mrope_interleaved": True, "mrope_section": [24, 20, 20], "type": "default",
        },
        "rope_theta": 1000000, "shared_expert_intermediate_size": 0, "use_qk_norm": True, "vocab_size": 152064,
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_omni_moe_vision_encoder", "apply_vit_abs_pos_embed": True, "image_size": 768,
        "in_channels": 3, "in_chans": 3, "out_hidden_size": 2048, "spatial_patch_size": 16, "tokens_per_second": 2,
    }  # fmt: skip
    heard = {
        "model_type": "qwen3_omni_moe_audio_encoder", "add_cross_attention": False, "conv_chunksize": 500,
        "d_model": 1280, "n_window": 50, "n_window_infer": 800, "output_dim": 2048, "tie_word_embeddings": True,
    }  # fmt: skip
    thinker = {
        "model_type": "qwen3_omni_moe_thinker", "audio_config": heard, "audio_start_token_id": 151669,
        "audio_token_id": 151675, "position_id_per_seconds": 13, "seconds_per_chunk": 2, "text_config": words,
        "vision_config": vision,
    }  # fmt: skip
    whole = {
        "model_type": "qwen3_omni_moe", "thinker_config": thinker, "code2wav_config": {"hidden_size": 1},
        "talker_config": {"hidden_size": 1}, "enable_audio_output": True, "tts_bos_token_id": 151672,
    }  # fmt: skip
    assert read_fields("qwen3-omni-30b-a3b", whole, "config.json") == preset("qwen3-omni-30b-a3b")
    words["rope_scaling"]["interleaved"] = False  # type: ignore[index]
    with pytest.raises(UserError, match=r"thinker_config.text_config.interleaved is False; supported: True"):
        read_fields("", whole, "config.json")


PUBLISHED: dict[str, Fields] = {
    "internvl_chat": {
        "_commit_hash": None, "auto_map": {"AutoModel": "x"}, "dynamic_image_size": True, "hidden_size": 6144,
        "max_dynamic_patch": 12, "min_dynamic_patch": 1, "pad2square": False, "template": "internlm2-chat",
        "torch_dtype": "bfloat16", "transformers_version": None, "use_backbone_lora": 0, "use_llm_lora": 0,
        "use_thumbnail": True, "image_fold": None, "tie_word_embeddings": False, "output_attentions": False,
    },
    "vision": {
        "_name_or_path": "", "initializer_factor": 0.1, "initializer_range": 1e-10, "max_length": 20, "num_beams": 1,
        "repetition_penalty": 1.0, "return_dict": True, "temperature": 1.0, "id2label": {"0": "LABEL_0"}, "top_k": 50,
        "tie_word_embeddings": True, "use_bfloat16": True, "use_flash_attn": True, "is_decoder": False,
        "capacity_factor": 1.2, "eval_capacity_factor": 1.4, "laux_allreduce": "all_nodes", "moe_coeff_ratio": 0.5,
        "moe_intermediate_size": 768, "moe_output_scale": 4.0, "noisy_gate_policy": "RSample_before", "num_experts": 8,
        "num_routed_experts": 4, "num_shared_experts": 4, "shared_expert_intermediate_size": 3072, "use_moe": False,
        "use_residual": True, "use_rts": False, "use_weighted_residual": False, "ep_size": 1,
    },
    "internlm2": {
        "attn_implementation": "flash_attention_2", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        "initializer_range": 0.02, "use_cache": True, "typical_p": 1.0, "length_penalty": 1.0,
    },
    "qwen2": {
        "max_window_layers": 70, "sliding_window": None, "use_sliding_window": False, "moe_config": None,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, "use_bfloat16": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("language", ["internlm2", "qwen2"])
def test_what_published_files_hold_beside_is_no_hindrance(tmp_path: Path, language: str) -> None:
    llm = {**INTERNVL_CHAT["llm_config"], **PUBLISHED[language], "model_type": language}
    if language == "qwen2":
        del llm["bias"]
        llm["architectures"] = ["Qwen2ForCausalLM"]
    config = {**INTERNVL_CHAT, **PUBLISHED["internvl_chat"], "llm_config": llm}
    config["vision_config"] = {**INTERNVIT_6B, **PUBLISHED["vision"]}
    found = read(tmp_path, config)
    assert found.vision == PRESETS["internvl-chat-1.5"].vision
    assert found.prompt.chat_template == "internlm2-chat"


@pytest.mark.parametrize("family", ["internvl", "llava", "llava_next"])
def test_what_transformers_writes_by_itself_is_read(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    for language in ("qwen2", "llama", "mistral"):
        written = transformers.AutoConfig.for_model(family, text_config={"model_type": language})
        written.vision_config.patch_size = [14, 14] if family == "internvl" else 14
        written.save_pretrained(tmp_path)
        read = preset(str(tmp_path))
        assert read.prompt.image_token_id == written.image_token_id
        assert read.language.vocab_size == written.text_config.vocab_size


def test_what_a_model_is_told_changes_no_profile() -> None:
    model = PRESETS["llava-1.5-7b"]
    other = replace(model, prompt=replace(model.prompt, chat_template=None, image_token_id=None))
    assert other.hash == model.hash != replace(model, newline=True).hash


def test_paddleocr_vl_may_have_the_language_models_fields_and_no_section(tmp_path: Path) -> None:
    """As in transformers: its class reads them so, and writes a section."""
    transformers = pytest.importorskip("transformers")
    other = {**PADDLEOCR_VL, "hidden_size": 512, "rope_theta": 7e4, "rms_norm_eps": 1e-3, "num_key_value_heads": 4}
    transformers.PaddleOCRVLConfig(**other).save_pretrained(tmp_path / "saved")
    assert "text_config" in json.loads((tmp_path / "saved/config.json").read_text())
    read, saved = (preset(str(folder)) for folder in (write(tmp_path / "published", other), tmp_path / "saved"))
    assert (read.language.hidden_size, read.language.rope_theta, read.language.kv_heads) == (512, 7e4, 4)
    assert replace(read, name="") == replace(saved, name="")
