"""Small random models of every family, built by transformers; and inputs of every kind for them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.vlm.data.chat_program import GENERATION
from megatron.vlm.data.templates import TEMPLATES

IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VOCABULARY, SIDE, TILE = 127, 126, 125, 130, 4, 16
AUDIO_TOKEN, AUDIO_START = 124, 123
TEXT = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA3_SCALING = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
INTERN_VIT = {
    "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 64,
    "image_size": [TILE, TILE], "patch_size": [TILE // SIDE, TILE // SIDE],
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 64, "image_size": TILE, "patch_size": TILE // SIDE,
}  # fmt: skip
IDEFICS_3 = {name: value for name, value in CLIP.items() if name != "model_type"}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
QWEN_VIT = {"depth": 3, "num_heads": 4, "patch_size": 4}
QWEN2_VL = {**QWEN_VIT, "embed_dim": 48, "hidden_size": 48, "mlp_ratio": 2}
QWEN2_5_VL = {
    **QWEN_VIT, "hidden_size": 48, "out_hidden_size": 48, "intermediate_size": 40, "window_size": 16,
    "fullatt_block_indexes": [1],
}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}
QWEN3_VL = {
    **QWEN_VIT, "hidden_size": 48, "out_hidden_size": 48, "intermediate_size": 80, "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
MROPE_INTERLEAVED = {"rope_type": "default", "mrope_section": [3, 2, 3], "mrope_interleaved": True, "rope_theta": 1e4}
QWEN3_VL_TEXT = {**TEXT, "num_hidden_layers": 3, "head_dim": 16, "rope_parameters": MROPE_INTERLEAVED}
AUDIO = {
    "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "output_dim": 48,
    "num_mel_bins": 10,
}  # fmt: skip
HEARD_2_5 = {"audio_config": {**AUDIO, "n_window": 4}}
HEARD_3 = {"audio_config": {**AUDIO, "n_window_infer": 200, "downsample_hidden_size": 6}}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN3_5 = {name: value for name, value in QWEN3_VL.items() if name != "deepstack_visual_indexes"}
QWEN3_5_TEXT = {
    **TEXT, "num_hidden_layers": 3, "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_key_head_dim": 12,
    "linear_value_head_dim": 10, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "rope_parameters": {**MROPE_INTERLEAVED, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    "rms_norm_eps": 1e-3,
}  # fmt: skip
"""What a linear layer says of a sample's first tokens goes with one product of a query and a key; where that is next to
nothing the norm behind blows rounding up: with transformers' own epsilon a word's last bit moves logits by 5e-5."""
SHARED = {"shared_expert_intermediate_size": 24}
GRIDS = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
VIP = [-2, -4, 1]
"""Layers whose features stand side by side, no more than run."""
UNTIED, TIED = ({"tie_word_embeddings": tied} for tied in (False, True))
LLAMA = {**TEXT, "model_type": "llama"}
QWEN = {**TEXT, "model_type": "qwen2"}
QWEN3 = {**TEXT, "model_type": "qwen3", "head_dim": 16}
MISTRAL = {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": 512}
MINISTRAL = {
    **TEXT, "model_type": "ministral3", "head_dim": 16, "pad_token_id": None, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, **YARN, "mscale": 1.0, "mscale_all_dim": 0.5,
        "llama_4_scaling_beta": 0.4,
    },
}  # fmt: skip
"""Beyond 16 tokens queries are scaled."""

GEMMA = {
    **TEXT, "num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}  # fmt: skip
"""A window shorter than the samples, and narrower than an image with words around it."""

PALIGEMMA_VIT = {**SIGLIP, "image_size": TILE // 2}
"""Four features an image."""
PALIGEMMA = {**TEXT, "model_type": "gemma", "head_dim": 16, "num_key_value_heads": 1, "pad_token_id": VOCABULARY - 1}
"""Transformers' word of padding has no gradient, so that it is one which no sample has."""
PALIGEMMA_2 = {
    **PALIGEMMA, "model_type": "gemma2", "num_hidden_layers": 3, "num_key_value_heads": 2, "query_pre_attn_scalar": 20,
    "sliding_window": 5, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 4.0,
}  # fmt: skip
"""A window shorter than prompts and answers; scores and logits near their caps."""

GEMMA_4_VIT = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 12,
    "intermediate_size": 40, "patch_size": SIDE, "position_embedding_size": 30, "standardize": True,
}  # fmt: skip
GEMMA_4 = {
    **TEXT, "num_hidden_layers": 4, "head_dim": 12, "global_head_dim": 16, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "use_bidirectional_attention": "vision", "final_logit_softcapping": 4.0, "pad_token_id": VOCABULARY - 1,
}  # fmt: skip
"""The global layers have wider heads in one group, whose keys are values; logits near the cap. Transformers' word of
padding has no gradient, so that it is one which no sample has."""
GEMMA_4_PATCHES = {
    "patch_size": SIDE // 2, "pooling_kernel_size": 2, "mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 10,
}  # fmt: skip
"""Squares of two patches a side, as large as others' patches; places for images of up to ten a side."""
GEMMA_4_WORDS = {name: value for name, value in GEMMA_4.items() if name != "hidden_size_per_layer_input"}

GEMMA_4_INPUTS = {
    **GEMMA_4, "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCABULARY + 3, "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "attention_k_eq_v": False,
}  # fmt: skip
"""As E2B: the fourth layer takes keys and values of the third, the fifth of the second."""

GLM_VIT = {
    "depth": 2, "hidden_size": 48, "num_heads": 4, "patch_size": 4, "image_size": 20, "out_hidden_size": 48,
    "intermediate_size": 40,
}  # fmt: skip
GLM_TEXT = {
    **TEXT, "num_hidden_layers": 3,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5},
}  # fmt: skip
GLM_OCR_TEXT = {**GLM_TEXT, "head_dim": 16, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
GLM_MOE_TEXT = {
    **GLM_TEXT, "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.5},
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "routed_scaling_factor": 1.5,
}  # fmt: skip
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 40, "patch_size": 4, "image_size": 64, "hidden_act": "silu",
}  # fmt: skip

PADDLEOCR_VIT = {
    "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40, "patch_size": SIDE,
    "image_size": 5 * SIDE + 1,
}  # fmt: skip
PADDLEOCR_TEXT = {
    **TEXT, "head_dim": 16, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    "pad_token_id": VOCABULARY - 1,
}  # fmt: skip
"""Transformers' word of padding has no gradient, so that it is one which no sample has."""

GEMMA_JINJA, MISTRAL_JINJA, GLM_JINJA, GLM_THINKING_JINJA = (
    GENERATION.sub("", TEMPLATES[name].read_text()) for name in ("gemma", "mistral-v7", "glm-4.1v", "glm-4.5v")
)
"""Programs as folders have them, without tags of what is trained."""

CLAMPING = "gemma 4 with a ViT that clamps, heads that two ranks do not share evenly"
# name: (class prefix, vision, language, further fields)
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "internvl": ("InternVL", {}, QWEN, UNTIED),
    "internvl qk-norm rmsnorm": ("InternVL", {"norm_type": "rms_norm", "use_qk_norm": True}, LLAMA, UNTIED),
    "internvl qk-norm layernorm, biases, last norm": ("InternVL",
        {"use_qk_norm": True, "attention_bias": True, "use_mean_pooling": False}, QWEN, UNTIED),
    "internvl tied": ("InternVL", {"attention_bias": True}, {**QWEN, "tie_word_embeddings": True}, {}),
    "internvl earlier features, llama3 rotation": ("InternVL", {"num_hidden_layers": 3, "norm_type": "rms_norm"},
        {**LLAMA, "rope_parameters": LLAMA3_SCALING},
        {"tie_word_embeddings": False, "vision_feature_layer": -2, "downsample_ratio": 0.25}),
    "internvl qwen3": ("InternVL", {}, QWEN3, UNTIED),
    "internvl 3.5-38b": ("InternVL", {"norm_type": "rms_norm", "use_qk_norm": True},
        {**QWEN3, "num_key_value_heads": 1}, UNTIED),
    "internvl yarn, groups of heads that two ranks do not share evenly": ("InternVL", {}, {
            **QWEN, "num_attention_heads": 6, "num_key_value_heads": 3,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN},
        }, UNTIED),
    "internvl dynamic rotation": ("InternVL", {}, {**LLAMA, "max_position_embeddings": 13, "rope_parameters": DYNAMIC},
        UNTIED),
    "internvl qwen3-moe": ("InternVL", {}, {**QWEN3, **EXPERTS, "model_type": "qwen3_moe", "norm_topk_prob": True},
        UNTIED),
    "internvl qwen3-moe, weights of experts as they are": ("InternVL", {},
        {**QWEN3, **EXPERTS, "model_type": "qwen3_moe", "num_experts_per_tok": 3}, UNTIED),
    "llava": ("Llava", {}, {**LLAMA, "num_key_value_heads": 4}, {}),
    "llava with class token": ("Llava", {"hidden_act": "gelu"}, LLAMA,
        {"vision_feature_select_strategy": "full", "multimodal_projector_bias": False}),
    "llava siglip": ("Llava", SIGLIP, QWEN, {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}),
    "llava-next vicuna": ("LlavaNext", {}, {**LLAMA, "num_key_value_heads": 4}, {}),
    "llava-next mistral": ("LlavaNext", {}, MISTRAL, {}),
    "llava-next-video": ("LlavaNextVideo", {}, LLAMA, {}),
    "vip-llava": ("VipLlava", {"num_hidden_layers": 5}, LLAMA, {"vision_feature_layer": VIP}),
    "llava of several layers, with class token": ("Llava", {}, LLAMA,
        {"vision_feature_select_strategy": "full", "vision_feature_layer": [-1, 1]}),
    "llava-onevision": ("LlavaOnevision", SIGLIP, QWEN, {}),
    "llava-onevision tied": ("LlavaOnevision", {**SIGLIP, "image_size": TILE + 3},
        {**QWEN, "tie_word_embeddings": True}, {"tie_word_embeddings": True, "vision_feature_layer": -2}),
    "gemma 3": ("Gemma3", SIGLIP, GEMMA, {"mm_tokens_per_image": 4}),
    "gemma 3 untied, a window within an image": ("Gemma3", {**SIGLIP, "image_size": TILE + 3}, {
            **GEMMA, "sliding_window": 3, "head_dim": 12, "query_pre_attn_scalar": 12, "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        }, {"mm_tokens_per_image": 16, "tie_word_embeddings": False}),
    "gemma 4": ("Gemma4", GEMMA_4_VIT, GEMMA_4, {}),
    "gemma 4 with inputs of layers": ("Gemma4", GEMMA_4_VIT, GEMMA_4_INPUTS, {}),
    "gemma 4 moe": ("Gemma4", GEMMA_4_VIT, {
            **GEMMA_4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32,
            "num_global_key_value_heads": 2,
        }, {}),
    "gemma 4 untied, values apart, images in one direction, a square of two": ("Gemma4",
        {**GEMMA_4_VIT, "standardize": False, "pooling_kernel_size": 2}, {
            **GEMMA_4, "attention_k_eq_v": False, "global_head_dim": 12, "sliding_window": 3, "num_attention_heads": 6,
            "num_key_value_heads": 3, "use_bidirectional_attention": None, "final_logit_softcapping": None,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": {
                    "rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0, "rope_theta": 1e5,
                },
            },
        }, UNTIED),
    "paligemma": ("PaliGemma", PALIGEMMA_VIT, PALIGEMMA, {"projection_dim": 48}),
    "paligemma untied, all heads with their own keys": ("PaliGemma", {**PALIGEMMA_VIT, "image_size": TILE + 3},
        {
            **PALIGEMMA, "head_dim": 12, "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
        }, {"projection_dim": 48, "tie_word_embeddings": False}),
    "paligemma 2": ("PaliGemma", PALIGEMMA_VIT, PALIGEMMA_2, {"projection_dim": 48}),
    "paligemma 2 without caps, one kind of layer": ("PaliGemma", PALIGEMMA_VIT, {
            **PALIGEMMA_2, "layer_types": ["full_attention"] * 3, "attn_logit_softcapping": None,
            "final_logit_softcapping": None, "query_pre_attn_scalar": 16,
        }, {"projection_dim": 48}),
    "gemma 4 unified": ("Gemma4Unified", GEMMA_4_PATCHES, GEMMA_4_WORDS, {}),
    "gemma 4 unified untied, values apart, images in one direction": ("Gemma4Unified",
        {**GEMMA_4_PATCHES, "patch_size": SIDE, "pooling_kernel_size": 1, "rms_norm_eps": 0.01},
        {**GEMMA_4_WORDS, "attention_k_eq_v": False, "use_bidirectional_attention": None, "sliding_window": 3}, UNTIED),
    CLAMPING: ("Gemma4", {
            **GEMMA_4_VIT, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16,
            "use_clipped_linears": True,
        }, GEMMA_4, {}),
    "idefics 3": ("Idefics3", IDEFICS_3, LLAMA, {}),
    "smolvlm tied, odd patches": ("SmolVLM", {**IDEFICS_3, "image_size": 26, "hidden_act": "gelu"},
        {**LLAMA, "rope_parameters": LLAMA3_SCALING}, {"scale_factor": 3, "tie_word_embeddings": True}),
    "mistral 3": ("Mistral3", PIXTRAL, MISTRAL, UNTIED),
    "mistral 3 tied, biases": ("Mistral3", {**PIXTRAL, "hidden_act": "gelu", "rope_theta": 100.0}, MISTRAL,
        {"multimodal_projector_bias": True}),
    "ministral 3": ("Mistral3", PIXTRAL, MINISTRAL, UNTIED),
    "lighton ocr": ("LightOnOcr", PIXTRAL, QWEN3, {}),
    "deepseek-vl": ("DeepseekVL", SIGLIP, LLAMA, UNTIED),
    "deepseek-vl tied": ("DeepseekVL",
        {**SIGLIP, "hidden_act": "gelu", "image_size": TILE + 3, "vision_use_head": True},
        {**LLAMA, "rope_parameters": LLAMA3_SCALING}, {}),
    "glm-4.1v": ("Glm4v", GLM_VIT, GLM_TEXT, {}),
    "glm-4.6v dense, tied, biases": ("Glm46V",
        {**GLM_VIT, "model_type": "glm4v_vision", "attention_bias": True, "hidden_act": "gelu"}, {
            **GLM_TEXT, "model_type": "glm4v_text",
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 2, 2]},
        }, TIED),
    "glm-4.5v": ("Glm4vMoe", GLM_VIT, GLM_MOE_TEXT, {}),
    "glm-4.5v, groups of experts, two dense layers": ("Glm4vMoe", GLM_VIT, {
            **GLM_MOE_TEXT, "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
            "first_k_dense_replace": 2, "n_shared_experts": 2, "attention_bias": False,
        }, TIED),
    "glm ocr": ("GlmOcr", {**GLM_VIT, "intermediate_size": 56}, GLM_OCR_TEXT, {}),
    "glm ocr without biases, tied": ("GlmOcr", {**GLM_VIT, "attention_bias": False, "hidden_act": "gelu"}, GLM_TEXT,
        TIED),
    "paddleocr-vl": ("PaddleOCRVL", PADDLEOCR_VIT, PADDLEOCR_TEXT, UNTIED),
    "paddleocr-vl tied": ("PaddleOCRVL",
        {**PADDLEOCR_VIT, "hidden_act": "gelu", "layer_norm_eps": 1e-3, "image_size": 2 * SIDE},
        {**PADDLEOCR_TEXT, "head_dim": 12, "rope_parameters": MROPE}, {}),
    "qwen2-vl": ("Qwen2VL", QWEN2_VL, {**TEXT, "rope_parameters": MROPE}, {}),
    "qwen2.5-vl": ("Qwen2_5_VL", QWEN2_5_VL, {**TEXT, "rope_parameters": MROPE}, {}),
    "qwen2.5-vl tied": ("Qwen2_5_VL", {**QWEN2_5_VL, "fullatt_block_indexes": [0, 2]},
        {**TEXT, "rope_parameters": MROPE}, TIED),
    "qwen2.5-omni": ("Qwen2_5OmniThinker", QWEN2_5_VL, {**TEXT, "rope_parameters": MROPE}, HEARD_2_5),
    "qwen3-omni": ("Qwen3OmniMoeThinker", QWEN3_VL, {**QWEN3_VL_TEXT, **EXPERTS}, HEARD_3),
    "qwen3-vl": ("Qwen3VL", QWEN3_VL, QWEN3_VL_TEXT, {}),
    "qwen3-vl-moe": ("Qwen3VLMoe", QWEN3_VL, {**QWEN3_VL_TEXT, **EXPERTS}, {}),
    "qwen3.5": ("Qwen3_5", QWEN3_5, QWEN3_5_TEXT, {}),
    "qwen3.5-moe": ("Qwen3_5Moe", QWEN3_5, {**QWEN3_5_TEXT, **EXPERTS, **SHARED}, {}),
    "qwen3.5 tied, groups of heads of linear attention that two ranks do not share evenly": ("Qwen3_5", QWEN3_5,
        {
            **QWEN3_5_TEXT, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3,
        }, TIED),
    "qwen3-vl tied, one feature": ("Qwen3VL",
        {**QWEN3_VL, "deepstack_visual_indexes": [1], "num_position_embeddings": 4}, QWEN3_VL_TEXT, TIED),
}  # fmt: skip


def classes(family: str) -> tuple[Any, Any]:
    import transformers

    prefix = FAMILIES[family][0]
    return getattr(transformers, f"{prefix}Config"), getattr(transformers, f"{prefix}ForConditionalGeneration")


def config_fields(family: str) -> dict[str, Any]:
    prefix, vision, text, fields = FAMILIES[family]
    if prefix.startswith(("Qwen", "Glm", "Gemma4", "Paddle")):
        fields = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, **fields}
        sounds = {"audio_token_id": AUDIO_TOKEN, "audio_start_token_id": AUDIO_START}
        fields = {"vision_start_token_id": VISION_START, **sounds, **fields} if "Omni" in prefix else fields
    elif prefix in ("Idefics3", "SmolVLM", "LightOnOcr", "DeepseekVL"):
        fields = {"image_token_id": IMAGE_TOKEN, **fields}
    elif prefix == "InternVL":
        fields = {"image_token_id": IMAGE_TOKEN, **fields}
        vision = {**INTERN_VIT, **vision}
    else:
        fields = {"image_token_index": IMAGE_TOKEN, **fields}
        vision = vision if prefix in ("LlavaOnevision", "Gemma3", "Mistral3", "PaliGemma") else {**CLIP, **vision}
    if prefix.startswith("LlavaNext"):
        fields = {"image_grid_pinpoints": GRIDS, **fields}
    if prefix == "LlavaOnevision":
        side = vision["image_size"]
        fields = {"image_grid_pinpoints": [[side * h, side * w] for h in range(1, 7) for w in range(1, 7)], **fields}
    return {**fields, "vision_config": vision, "text_config": text}


def build(family: str, seed: int) -> torch.nn.Module:
    """A model of that family; every weight is random, those too that transformers starts from zero or one."""
    make_config, make_model = classes(family)
    return randomised(make_model(make_config(**config_fields(family))), seed)


def randomised(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The model with every weight drawn, about one where transformers starts from one.

    Of Gemma 4 norms of query and key about a half: no root divides its scores, and as large ones blow rounding up.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        kept = model.state_dict(keep_vars=True)  # with numbers that are not trained
        for weight in [*model.parameters(), *(one for one in kept.values() if not one.requires_grad)]:
            center = 1.0 if weight.dim() == 1 and weight.mean() > 0.5 else 0.0
            weight.copy_(center + 0.1 * torch.randn(weight.shape, generator=generator))
        for name, weight in model.named_parameters():
            if getattr(model.config, "model_type", "").startswith("gemma4") and name.endswith(
                ("q_norm.weight", "k_norm.weight")
            ):
                weight.mul_(0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        for name, module in model.named_modules():
            if hasattr(module, "input_min"):
                _clamp(module, name, generator)
    return model.eval()


def _clamp(matrix: torch.nn.Module, name: str, generator: torch.Generator) -> None:
    """Ranges that bite, of every matrix its own; but what goes into the first layer's is clamped alike, as published.

    Far out, where values are few: one at a bound would have its gradient or none as it is rounded. Not in all of them
    lies zero, which heads have that fill up ranks; and some have no bound, as transformers' at first.
    """
    kind = name.rpartition(".")[2]
    into, out_of = {"o_proj": (1.5, 1.1), "down_proj": (0.9, 0.4)}.get(kind, (2.6, 1.7))
    alike = ".layers.0." in name
    for end, scale in (("input", into), ("output", out_of)):
        drawn = scale * (1 + 0.3 * torch.rand(2, generator=generator))
        low, high = (-scale, scale) if alike and end == "input" else (-drawn[0], drawn[1])
        getattr(matrix, f"{end}_min").fill_(low)
        getattr(matrix, f"{end}_max").fill_(high)
    if ".layers.1." in name and kind in ("v_proj", "o_proj"):
        (matrix.output_min if kind == "v_proj" else matrix.input_min).fill_(0.05)
    if ".layers.2." in name and kind in ("k_proj", "up_proj"):
        matrix.output_max.fill_(torch.inf)


@dataclass(frozen=True)
class Sample:
    """One conversation: token ids [T] with image tokens in place, tiles [n, 3, S, S], (width, height) of the images.

    At native resolution tiles are patches, [n, 3, 2, S, S] where a pack has videos.
    """

    ids: Tensor
    pixels: Tensor
    sizes: tuple[tuple[int, int], ...]
    shown: tuple["Shown", ...] = ()
    sounds: tuple[Tensor, ...] = ()
    """Mel frames of each, [frames, bins]."""


@dataclass(frozen=True)
class Shown:
    """An image at native resolution, or a video: patches in time, height and width, seconds between its steps."""

    grid: tuple[int, int, int]
    seconds: float | None = None
    """None: an image."""

    @property
    def patches(self) -> int:
        steps, rows, columns = self.grid
        return steps * rows * columns


def samples(
    image_tokens: dict[tuple[int, int], tuple[int, int]], per_sample: list[list[tuple[int, int]]], tile: int = TILE
) -> list[Sample]:
    """Samples with images of the sizes listed; `image_tokens` says how many tokens and tiles an image of a size has."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for number, sizes in enumerate(per_sample):
        pieces = [torch.randint(0, IMAGE_TOKEN, (3 + number,), generator=generator)]
        for size in sizes:
            pieces.append(torch.full((image_tokens[size][0],), IMAGE_TOKEN))
            pieces.append(torch.randint(0, IMAGE_TOKEN, (4,), generator=generator))
        tiles = sum(image_tokens[size][1] for size in sizes)
        made.append(Sample(torch.cat(pieces), torch.randn(tiles, 3, tile, tile, generator=generator), tuple(sizes)))
    return made
