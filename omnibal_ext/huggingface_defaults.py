"""What a config.json leaves out: the defaults of transformers, and of InternVL's own code, by model type."""

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
    "qwen2": {**_QWEN, "use_sliding_window": False, "sliding_window": 4096},
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
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
    },
    "internvl_chat": {"downsample_ratio": 0.5, "select_layer": -1, "ps_version": "v1"},
    "llava": {
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
    },
}
DEFAULTS["llava_next"] = {**DEFAULTS["llava"], "image_grid_pinpoints": None}
