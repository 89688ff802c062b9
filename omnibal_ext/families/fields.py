"""Fields of a config.json: sizes, by transformers' names; the range of each; those without effect on training."""

from collections.abc import Mapping
from typing import Any

from omnibal_ext.reading.checks import Check, finite, flag, integer

SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
TOWER_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


def text(*sizes: int | None, **more: Any) -> dict[str, Any]:
    """Return a language model's config.json: the values of `SIZES`, in that order, and `more` by their names."""
    return dict(zip(SIZES, sizes, strict=True)) | more


def tower(*sizes: int, **more: Any) -> dict[str, Any]:
    """Return a ViT's config.json: values of `TOWER_SIZES` (layers, width, heads, MLP's width), `more` by their
    names."""
    return dict(zip(TOWER_SIZES, sizes, strict=True)) | more


def names(text: str) -> frozenset[str]:
    """Return the words of a text, separated by white space, as a set."""
    return frozenset(text.split())


# Of every config.json: names, versions, who saved it, what generation and other heads do, how weights were drawn.
GENERAL = names(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attn_implementation
    auto_map bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward decoder_start_token_id
    diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    initializer_factor initializer_range is_decoder label2id length_penalty max_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    output_scores pad_token_id prefix problem_type remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config
    transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache use_flash_attn
    """
)
LANGUAGE = GENERAL | names(  # limits, which change no result below them; layers that transformers leaves out
    "max_position_embeddings model_max_length num_nextn_predict_layers"
)
DATA = names(  # how images were cut: the dataset's own
    """
    dynamic_image_size ignore_index image_fold image_seq_length max_dynamic_patch min_dynamic_patch
    system_message template use_thumbnail
    """
)
HEADS, WIDTH = integer(1, 2**12), integer(1, 2**20)
SIDE = integer(1, 2**14)
POSITIONS = integer(1, 2**40)
SHARE = finite(0, 1)
BASE = finite(1, 1e12)
FACTOR = finite(1e-3, 1e6)
_RANGES: tuple[tuple[Check[Any], str], ...] = (
    (integer(1, 2**10), "depth num_hidden_layers"),
    (integer(1, 2**10), "full_attention_interval linear_conv_kernel_dim sliding_window_pattern temporal_patch_size"),
    (integer(0, 2**10), "first_k_dense_replace n_shared_experts"),
    (WIDTH, "embed_dim hidden_size intermediate_size mm_embed_dim moe_intermediate_size out_hidden_size"),
    (WIDTH, "global_head_dim head_dim linear_key_head_dim linear_value_head_dim query_pre_attn_scalar window_size"),
    (WIDTH, "mm_posemb_size num_position_embeddings position_embedding_size shared_expert_intermediate_size"),
    (HEADS, "linear_num_key_heads linear_num_value_heads num_attention_heads num_heads"),
    (HEADS, "num_global_key_value_heads num_key_value_heads"),
    (integer(1, 2**24), "vocab_size vocab_size_per_layer_input"),
    (integer(0, 2**24), "image_token_id image_token_index pad_token_id"),
    (POSITIONS, "max_position_embeddings sliding_window"),
    (integer(1, 2**12), "n_group n_routed_experts num_experts num_experts_per_tok num_local_experts"),
    (integer(1, 2**12), "top_k_experts topk_group"),
    (SIDE, "image_size patch_size"),
    (integer(1, 64), "pooling_kernel_size scale_factor"),
    (finite(0, 1), "layer_norm_eps rms_norm_eps"),
    (finite(0, 1e3), "router_aux_loss_coef"),
    (finite(1e-3, 1e6), "attn_logit_softcapping final_logit_softcapping"),
    (BASE, "rope_local_base_freq rope_theta"),
    (SHARE, "partial_rotary_factor"),
    (flag, "attention_bias attention_k_eq_v enable_moe_block multimodal_projector_bias norm_topk_prob"),
    (flag, "qk_normalization qkv_bias standardize tie_word_embeddings use_clipped_linears use_double_wide_mlp"),
    (flag, "use_mean_pooling use_qk_norm use_sliding_window"),
)
CHECKS: Mapping[str, Check[Any]] = {field: check for check, fields in _RANGES for field in names(fields)}
"""Field -> the check of its value; other fields are checked where they are read."""
