"""Read the language model of Qwen3.5 and Qwen3.6: Gated DeltaNet in most layers, gated attention in the others.

Partial rotary dimensions, norms with 1 + weight, and in mixtures one shared expert.
"""

from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import FULL, chosen_experts, kinds_of_layers, language_sizes
from omnibal_ext.families.towers.rotation import Rotation, partial_rotation, rotary_share, rotation_fields
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.experts import Experts
from omnibal_ext.modalities.language.layer import Layer
from omnibal_ext.modalities.language.linear_attention import LinearAttention

LINEAR = "linear_attention"
ROTATION = Rotation(sections=(11, 11, 10), interleaved=True)


def read_linear_language(section: Section) -> LanguageArchitecture:
    """Read a Qwen3.5 language model, mostly of linear attention. Raises UserError naming an unsupported field."""
    section.must(hidden_act="silu", attention_bias=False, attention_dropout=0.0, attn_output_gate=True)
    is_mixture = section["model_type"] == "qwen3_5_moe_text"
    sizes = language_sizes(section, section.take("head_dim"), is_mixture)
    rope, base = rotation_fields(section, ROTATION)
    rotated = _rotated(section, rope, sizes.head_dim)
    rotation = partial_rotation(section, rope, base, rotated, sizes.head_dim, ROTATION)
    experts = _experts(section) if is_mixture else None
    kinds = kinds_of_layers(section, sizes.layers, section.take_if("full_attention_interval") or 4, LINEAR)
    if FULL not in kinds:
        raise UserError(f"{section.where}.layer_types has no {FULL!r}; supported: at least one")
    attention, linear = sizes.attention(rope=rotation, qk_norm=True, output_gate=True), _linear(section)
    section.refuse_unread()
    layers = (Layer(attention if kind == FULL else linear, sizes.ffn_hidden_size, experts) for kind in kinds)
    return sizes.model(layers, centred_norms=True, older=sizes.older)


def _rotated(section: Section, rope: dict[str, Any], head_size: int) -> int:
    """Return how many dimensions of a head RoPE rotates; a quarter if config.json does not say."""
    share = rotary_share(section, rope, 0.25)
    rotated = int(head_size * share)
    if rotated % 2 or not rotated:
        raise UserError(
            f"{section.where}: partial_rotary_factor {share} rotates {rotated} of a head's {head_size} dimensions; "
            "supported: an even number from 2"
        )
    return rotated


def _linear(section: Section) -> LinearAttention:
    groups, heads = section.take("linear_num_key_heads"), section.take("linear_num_value_heads")
    if heads % groups:
        raise UserError(f"{section.where}: {heads} heads of values are no multiple of {groups} of keys (linear_num_*)")
    return LinearAttention(
        groups=groups,
        heads=heads,
        key_width=section.take("linear_key_head_dim"),
        value_width=section.take("linear_value_head_dim"),
        kernel=section.take("linear_conv_kernel_dim"),
    )


def _experts(section: Section) -> Experts:
    """Read experts of every layer; a token's weights are normalised to sum 1, whatever config.json says."""
    section.must(decoder_sparse_step=1, norm_topk_prob=True)
    count = section.take("num_experts")
    balance, shared = section.take("router_aux_loss_coef"), "shared_expert_intermediate_size"
    return Experts(count, chosen_experts(section, count), balance=balance, shared=section.take(shared))
