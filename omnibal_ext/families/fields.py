"""Fields of a config.json: those of sizes, by transformers' names, and those that say nothing about training."""

from typing import Any

SIZES = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
TOWER_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


def text(*sizes: int | None, **more: Any) -> dict[str, Any]:
    """Fields of a language model: `SIZES`, in that order, and `more` by their names."""
    return dict(zip(SIZES, sizes, strict=True)) | more


def tower(*sizes: int, **more: Any) -> dict[str, Any]:
    """Fields of a ViT: `TOWER_SIZES`, in that order, and `more` by their names."""
    return dict(zip(TOWER_SIZES, sizes, strict=True)) | more


def names(text: str) -> frozenset[str]:
    """Those that stand in a text."""
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
LANGUAGE = GENERAL | {"max_position_embeddings", "model_max_length"}  # a limit, which changes no result below it
DATA = names(  # how images were cut: the dataset's own
    """
    dynamic_image_size ignore_index image_fold image_seq_length max_dynamic_patch min_dynamic_patch
    system_message template use_thumbnail
    """
)
