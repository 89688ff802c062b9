"""Core's transformer layer from Transformer Engine or core's own modules, with the same names of weights.

| `--transformer-impl` | projections | norms |
|---|---|---|
| transformer_engine | Transformer Engine's | inside the projection behind them |
| local | core's | torch's |

A checkpoint of one implementation loads with the other: where a norm is inside a projection, its weight still carries
the name of a norm in front of it. Layers whose cheap outputs are recomputed (`recompute`) have torch's norms in both.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron.vlm.models import transformer_engine
from megatron.vlm.models.attention.padding import AttentionOutput, QueryKeyValue, mixed
from megatron.vlm.models.norm import build_norm
from megatron.vlm.models.perceptron import Perceptron

NORMS_INSIDE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Prefixes of norm weights in Transformer Engine's layers -> those in checkpoints."""


def by_transformer_engine(config: TransformerConfig) -> bool:
    """Check whether layers of this configuration are built from Transformer Engine."""
    return bool(config.transformer_impl == "transformer_engine")


def layer_submodules(config: TransformerConfig, recompute: bool) -> TransformerLayerSubmodules:
    """Return the modules of core's layer, with norms before attention and perceptron; the caller sets the rest.

    `recompute`: norms outside of projections, and our perceptron, with both implementations.
    """
    if by_transformer_engine(config):
        submodules = get_gpt_layer_with_transformer_engine_submodules()
        if not recompute:
            submodules.sharded_state_dict_keys_map = dict(NORMS_INSIDE)
            return submodules
        inner = replace(submodules.mlp.keywords["submodules"], linear_fc1=transformer_engine.Columns)
        submodules.mlp = partial(submodules.mlp.func, submodules=inner)
    else:
        submodules = get_gpt_layer_local_submodules(normalization=config.normalization)
    if recompute:
        submodules.mlp = partial(Perceptron.as_mlp_submodule, **submodules.mlp.keywords)
    submodules.input_layernorm = submodules.pre_mlp_layernorm = build_norm
    submodules.sharded_state_dict_keys_map = {}
    return submodules


def projections(
    config: TransformerConfig, groups: int, filled: int | None, has_bias: bool, recompute: bool, **into_it: Any
) -> tuple[partial[Any], partial[Any]]:
    """Return the projections to query, key and value (with the norm, where it is inside) and behind the attention,
    padded from the model's `groups` of heads to `filled`. `into_it`: further arguments of the first."""
    into, out_of = ColumnParallelLinear, RowParallelLinear
    if by_transformer_engine(config):
        into = transformer_engine.Columns if recompute else transformer_engine.NormAndColumns
        out_of = transformer_engine.Rows
    return (
        partial(mixed(QueryKeyValue, into), groups=groups, filled=filled, has_bias=has_bias, **into_it),
        partial(mixed(AttentionOutput, out_of), groups=groups, filled=filled),
    )


def perceptron_projections(config: TransformerConfig) -> MLPSubmodules:
    """Return both projections of a perceptron that has no norm inside."""
    found: MLPSubmodules = layer_submodules(config, recompute=True).mlp.keywords["submodules"]
    return found


def set_projections(
    attention: SelfAttentionSubmodules,
    config: TransformerConfig,
    groups: int,
    has_bias: bool,
    recompute: bool,
    **into_it: Any,
) -> None:
    """Set the projections of core's attention to those of `projections`."""
    found = projections(config, groups, config.num_query_groups, has_bias, recompute, **into_it)
    attention.linear_qkv, attention.linear_proj = found
