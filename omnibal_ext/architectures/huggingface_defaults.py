"""What a config.json leaves out: the defaults of transformers, and of InternVL's own code, by model type.

And which of its fields say nothing about training, so that all others are read, or refused.
"""

from typing import Any

_LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN = {**_LLAMA, "intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151936}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "attention_bias": False, "mlp_bias": False},
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**_QWEN, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {**_QWEN, "head_dim": 128, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
    "internlm2": {**_LLAMA, "vocab_size": 103168, "bias": True},
    "clip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
    "internvl_vision": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": [448, 448],
        "patch_size": [14, 14],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "norm_type": "layer_norm",
        "attention_bias": False,
        "use_qk_norm": False,
        "use_mean_pooling": True,
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
    },
    "intern_vit_6b": {
        "hidden_size": 3200,
        "intermediate_size": 12800,
        "num_hidden_layers": 48,
        "num_attention_heads": 25,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "norm_type": "rms_norm",
        "qkv_bias": False,
        "qk_normalization": True,
    },
    "internvl": {
        "image_token_id": 151667,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
    },
    "internvl_chat": {"downsample_ratio": 0.5, "select_layer": -1, "ps_version": "v1"},
    "llava": {
        "image_token_index": 32000,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
    },
}
_QWEN_VL_TEXT: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
    "rms_norm_eps": 1e-5,
    "use_sliding_window": False,
}
_QWEN_VL_TOWER: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
DEFAULTS |= {
    "qwen2_vl": {"image_token_id": 151655, "tie_word_embeddings": False},
    "qwen2_vl_text": {**_QWEN_VL_TEXT, "max_window_layers": 80},
    "qwen2_vl_vision": {**_QWEN_VL_TOWER, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4},
    "qwen2_5_vl": {"image_token_id": 151655, "tie_word_embeddings": False},
    "qwen2_5_vl_text": {**_QWEN_VL_TEXT, "max_window_layers": 80},
    "qwen2_5_vl_vision": {
        **_QWEN_VL_TOWER,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 4,
    },
}
DEFAULTS |= {
    "qwen3_vl": {"image_token_id": 151655, "tie_word_embeddings": False},
    "qwen3_vl_text": {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
    },
    "qwen3_vl_vision": {
        **_QWEN_VL_TOWER,
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
_ROUTERS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.001,
}
DEFAULTS |= {
    "qwen3_moe": {
        **_QWEN,
        **_ROUTERS,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_local_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    "qwen3_vl_moe": DEFAULTS["qwen3_vl"],
    "qwen3_vl_moe_text": {
        **_ROUTERS,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "num_local_experts": 60,
        "num_experts_per_tok": 4,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
    },
    "qwen3_vl_moe_vision": DEFAULTS["qwen3_vl_vision"],
}
_QWEN3_5_TEXT: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
DEFAULTS |= {
    "qwen3_5": {"image_token_id": 248056, "tie_word_embeddings": False},
    "qwen3_5_text": _QWEN3_5_TEXT,
    "qwen3_5_vision": {
        name: value for name, value in DEFAULTS["qwen3_vl_vision"].items() if name != "deepstack_visual_indexes"
    },
    "qwen3_5_moe_text": {
        **{name: value for name, value in _QWEN3_5_TEXT.items() if name != "intermediate_size"},
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.001,
    },
}
DEFAULTS |= {"qwen3_5_moe": DEFAULTS["qwen3_5"], "qwen3_5_moe_vision": DEFAULTS["qwen3_5_vision"]}
DEFAULTS["siglip_vision_model"] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
DEFAULTS["gemma3"] = {"mm_tokens_per_image": 256, "image_token_index": 262144, "tie_word_embeddings": True}
DEFAULTS["gemma3_text"] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 262208,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
DEFAULTS["llava_onevision"] = {
    **DEFAULTS["llava"],
    "image_token_index": 151646,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_9",
}
DEFAULTS["llava_next"] = {**DEFAULTS["llava"], "image_grid_pinpoints": None}
MODELS = (
    "internvl", "internvl_chat", "llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
    "qwen3_vl_moe", "qwen3_5",
    "qwen3_5_moe", "gemma3",
)  # fmt: skip
"""Model types of whole models; the others are of their parts."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Of every config.json: names, versions, what generation and other heads do, how weights were drawn.
_GENERAL = _names(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attn_implementation
    auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    initializer_factor initializer_range is_decoder label2id length_penalty max_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id prefix problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p use_bfloat16 use_cache use_flash_attn
    """
)
_LANGUAGE = _GENERAL | {"max_position_embeddings", "model_max_length"}  # a limit, which changes no result below it
_EXPERTS = _names(  # of a ViT with experts, which `use_moe` turns on
    """
    capacity_factor ep_size eval_capacity_factor laux_allreduce moe_coeff_ratio moe_intermediate_size moe_output_scale
    noisy_gate_policy num_experts num_routed_experts num_shared_experts shared_expert_intermediate_size use_residual
    use_rts use_weighted_residual
    """
)
_DATA = _names(  # how images were cut: the dataset's own
    """
    dynamic_image_size ignore_index image_fold image_seq_length max_dynamic_patch min_dynamic_patch
    system_message template use_thumbnail
    """
)
_QWEN_VL = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
_QWEN3_5 = ("qwen3_5", "qwen3_5_moe")
_MORE_TOKENS = _names("mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype")  # of layers for generation
_DENSE = _names("intermediate_size output_router_logits")  # of layers without experts, and of what is handed out
_QWEN_MARKS = _names("image_token_id vision_start_token_id vision_end_token_id vision_token_id video_token_id")
WITHOUT_EFFECT: dict[str, frozenset[str]] = {
    "llama": _LANGUAGE,
    "mistral": _LANGUAGE,
    "qwen2": _LANGUAGE | {"max_window_layers", "sliding_window"},  # the window is read where it is used
    "qwen3": _LANGUAGE | {"max_window_layers", "sliding_window"},
    "internlm2": _LANGUAGE,
    "qwen3_moe": _LANGUAGE | {"max_window_layers", "sliding_window"} | _DENSE,
    **{f"{one}_text": _LANGUAGE | {"max_window_layers", "sliding_window"} | _QWEN_MARKS for one in _QWEN_VL},
    "qwen3_vl_moe_text": _LANGUAGE | {"sliding_window"} | _DENSE | _QWEN_MARKS,
    **{f"{one}_vision": _GENERAL for one in _QWEN_VL},
    **dict.fromkeys(_QWEN_VL, _GENERAL | _QWEN_MARKS),
    **{f"{one}_text": _LANGUAGE | _MORE_TOKENS | _DENSE for one in _QWEN3_5},
    **{f"{one}_vision": _GENERAL for one in _QWEN3_5},
    **dict.fromkeys(_QWEN3_5, _GENERAL | _QWEN_MARKS),
    "clip_vision_model": _GENERAL | {"projection_dim", "vocab_size"},  # of the text beside it
    "internvl_vision": _GENERAL | {"layer_scale_init_value", "use_mean_pooling"},  # read where the last norm is
    "intern_vit_6b": _GENERAL | _EXPERTS,
    "internvl": _GENERAL | _DATA,
    "internvl_chat": _GENERAL | _DATA | {"hidden_size"},  # repeated from below
    "llava": _GENERAL | _DATA | {"vocab_size"},
    "llava_next": _GENERAL | _DATA | {"vocab_size"},
    "llava_onevision": _GENERAL | _DATA | {"vocab_size", "video_token_index"},
    "gemma3": _GENERAL | {"boi_token_index", "eoi_token_index"},
    "gemma3_text": _LANGUAGE
    | {"_sliding_window_pattern", "cache_implementation", "sliding_window"},  # of its writer; of generation; as above
    "siglip_vision_model": _GENERAL | {"projection_dim", "vision_use_head"},  # of what stands beside the layers
}
