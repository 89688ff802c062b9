"""Megatron's flags that model, plan and trainer set."""

from argparse import Namespace
from typing import Any

from megatron.vlm import platform
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.layer import Attention
from omnibal_ext.plan import Plan
from omnibal_ext.schedules.schedule import splits_backward

FIXED: dict[str, Any] = {
    "group_query_attention": True,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "tokenizer_type": "NullTokenizer",
    "micro_batch_size": 1,
    "eval_micro_batch_size": 1,
    "calculate_per_token_loss": True,
    "enable_one_logger": False,
    "dataloader_type": "external",
    "check_for_nan_in_loss_and_grad": False,
    "rerun_mode": "disabled",
    "eval_iters": None,
    "eval_interval": None,
}
"""Megatron's flags that are the same for every model and plan."""


def preset_defaults(architecture: Architecture, plan: Plan, known: Namespace) -> dict[str, Any]:
    """Return Megatron's flags, {attribute: value}, that follow from model, plan and parallel sizes (`known`)."""
    language = architecture.language
    attention = next(iter(language.attentions), Attention(1, 1, language.hidden_size))  # layers have their own
    ranks, chunks = plan.pipeline_model_parallel_size, plan.virtual_pipeline_model_parallel_size
    return {
        # Megatron requires a multiple of its pipeline stages; the plan cuts the chain.
        "num_layers": -(-language.layers // (ranks * chunks)) * ranks * chunks,
        "hidden_size": language.hidden_size,
        "ffn_hidden_size": language.usual.ffn_hidden_size,
        "num_attention_heads": attention.heads,
        "num_query_groups": attention.kv_heads,
        "kv_channels": attention.head_dim,
        "layernorm_epsilon": language.norm_epsilon,
        "add_qkv_bias": attention.qkv_bias,
        "rotary_base": int(attention.rope.theta),
        "vocab_size": language.vocab_size - 1,  # NullTokenizer adds one
        "pipeline_model_parallel_size": ranks,
        "num_virtual_stages_per_pipeline_rank": chunks if chunks > 1 else None,
        # Transformer Engine's layers hold the inputs of delayed weight gradients themselves.
        "delay_wgrad_compute": platform.HAS_TRANSFORMER_ENGINE and splits_backward(plan.schedule),
        "seq_length": plan.budgets.get("tokens", 4096),
        "max_position_embeddings": plan.budgets.get("tokens", 4096),
        "expert_tensor_parallel_size": known.tensor_model_parallel_size if known.expert_model_parallel_size == 1 else 1,
        **expert_defaults(language),
    }


def expert_defaults(language: LanguageArchitecture) -> dict[str, Any]:
    """Return Megatron's flags of a mixture of experts, {attribute: value}; {} for a model without."""
    experts = language.experts
    if experts is None:
        return {}
    return {
        "num_experts": experts.count,
        "moe_ffn_hidden_size": language.usual.ffn_hidden_size,
        "moe_router_topk": experts.chosen,
        "moe_router_pre_softmax": not experts.renormalised,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": ["seq_aux_loss"],
        "moe_aux_loss_coeff": [experts.balance],
    }
