"""Language models that several families have: defaults, names of weights, and their reading."""

from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.families.fields import LANGUAGE, text
from omnibal_ext.families.section import ModelType, Section
from omnibal_ext.families.towers.llama import Llama, read_llama
from omnibal_ext.families.towers.rotation import Rotation
from omnibal_ext.families.weights import Weight, llama, llama_of_experts
from omnibal_ext.modalities.language.architecture import LanguageArchitecture

ROUTERS: dict[str, Any] = {"decoder_sparse_step": 1, "router_aux_loss_coef": 0.001}
WINDOWS = frozenset({"max_window_layers", "sliding_window"})
"""Fields of a sliding window, which are read if it is used."""
DENSE = frozenset({"intermediate_size", "output_router_logits"})
"""Fields of layers without experts, and of outputs."""
LLAMA_WEIGHTS = tuple(llama())
"""Weights under Llama's names, which Qwen, Mistral, Vicuna and Yi have too."""
_LLAMA = text(32, 4096, 32, None, 11008, 32000, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False)
_QWEN = {
    **_LLAMA, "intermediate_size": 22016, "num_key_value_heads": 32, "vocab_size": 151936, "use_sliding_window": False,
    "sliding_window": 4096,
}  # fmt: skip
_MISTRAL = {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "sliding_window": 4096}
_MINISTRAL3 = {
    **_MISTRAL, "vocab_size": 131072, "num_hidden_layers": 34, "head_dim": 128, "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "type": "yarn", "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "max_position_embeddings": 262144,
        "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
_QWEN3_MOE = {
    **_QWEN,
    **ROUTERS,
    **text(24, 2048, 32, 4, 6144, 151936),
    "moe_intermediate_size": 768,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}


def _internlm2() -> tuple[Weight, ...]:
    model, layer = "language_model.model", "language_model.model.layers.{n}"
    halves = (f"{layer}.feed_forward.w1.weight", f"{layer}.feed_forward.w3.weight")
    return (
        Weight("word_embed", "embedding.weight", (f"{model}.tok_embeddings.weight",)),
        Weight("llm", "input_layernorm.weight", (f"{layer}.attention_norm.weight",)),
        # InternLM2 and Megatron order query, key and value alike: group by group.
        Weight("llm", "self_attention.linear_qkv.weight", (f"{layer}.attention.wqkv.weight",)),
        Weight("llm", "self_attention.linear_proj.weight", (f"{layer}.attention.wo.weight",)),
        Weight("llm", "pre_mlp_layernorm.weight", (f"{layer}.ffn_norm.weight",)),
        Weight("llm", "mlp.linear_fc1.weight", halves, "stacked"),
        Weight("llm", "mlp.linear_fc2.weight", (f"{layer}.feed_forward.w2.weight",)),
        Weight("head", "norm.weight", (f"{model}.norm.weight",)),
        Weight("head", "linear.weight", ("language_model.output.weight",), when="untied"),
    )


LANGUAGES: dict[str, tuple[ModelType, Llama]] = {
    "llama": (ModelType({**_LLAMA, "attention_bias": False, "mlp_bias": False}, LANGUAGE, LLAMA_WEIGHTS), Llama()),
    "mistral": (ModelType(_MISTRAL, LANGUAGE, LLAMA_WEIGHTS), Llama(slides=True)),
    "ministral3": (ModelType(_MINISTRAL3, LANGUAGE, LLAMA_WEIGHTS), Llama(slides=True, scales_queries=True)),
    "qwen2": (ModelType({**_QWEN, "max_window_layers": 28}, LANGUAGE | WINDOWS, LLAMA_WEIGHTS), Llama(qkv_bias=True)),
    "qwen3": (
        ModelType({**_QWEN, "head_dim": 128, "max_window_layers": 28}, LANGUAGE | WINDOWS, LLAMA_WEIGHTS),
        Llama(qk_norm=True),
    ),
    "qwen3_moe": (
        ModelType(_QWEN3_MOE, LANGUAGE | WINDOWS | DENSE, tuple(llama_of_experts(apart=True))),
        Llama(qk_norm=True, experts=True),
    ),
    "internlm2": (
        ModelType({**_LLAMA, "vocab_size": 103168, "bias": True}, LANGUAGE, _internlm2()),
        Llama(Rotation(outside=True), bias="bias"),
    ),
}
"""Model type -> (defaults and names of weights, properties of its code)."""


def read_language(section: Section) -> LanguageArchitecture:
    """Read a language model of `LANGUAGES`; unsupported fields are in `section.faults`, or raise UserError."""
    kind = section["model_type"]
    if kind not in LANGUAGES:
        raise UserError(f"{section.where}: model type {kind!r} is not supported as a language model")
    return read_llama(section, LANGUAGES[kind][1])
