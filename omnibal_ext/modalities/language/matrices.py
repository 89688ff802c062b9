"""The matrices of language layers."""

from dataclasses import replace
from typing import TYPE_CHECKING

from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.experts import Experts
from omnibal_ext.modalities.language.layer import Attention, Layer, LayerInputs
from omnibal_ext.modalities.language.linear_attention import LinearAttention
from omnibal_ext.modalities.matrix import APART, Matrix, Stored, perceptron

if TYPE_CHECKING:
    from omnibal_ext.architectures.architecture import Architecture


def matrices(model: "Architecture", ranks: int, stored: Stored = APART) -> dict[str, tuple[Matrix, ...]]:
    """Return the matrices in one language layer of each kind, by cost key, heads padded for `ranks` tensor ranks."""
    return {
        name: language_layer(model.language, layer, ranks, stored.gate_and_up)
        for name, layer in model.kinds_apart("llm").items()
        if isinstance(layer, Layer)
    }


def language_layer(
    language: LanguageArchitecture, layer: Layer, ranks: int = 1, one_matrix: bool = False
) -> tuple[Matrix, ...]:
    """Return a language layer's matrices, heads padded for `ranks` tensor-parallel ranks; `one_matrix`: gate and up are
    one in published files, with one adapter.

    In models with experts only attention has adapters, linear attention too.
    """
    width = language.hidden_size
    if isinstance(layer.mixer, LinearAttention):
        mixer = _linear_attention(width, layer.mixer, ranks)
    else:
        mixer = _attention(width, layer.mixer, ranks)
    shares = (1,) if one_matrix else (layer.ffn_hidden_size,) * 2
    feed_forward = (
        _experts(width, layer.ffn_hidden_size, layer.experts)
        if layer.experts
        else perceptron("mlp.", width, layer.ffn_hidden_size, shares=shares)
    )
    if language.experts:
        feed_forward = tuple(replace(matrix, is_adaptable=False) for matrix in feed_forward)
    return (*mixer, *feed_forward, *_layer_inputs(width, layer.layer_inputs))


def _attention(width: int, mixer: Attention, ranks: int) -> tuple[Matrix, ...]:
    groups, heads = mixer.groups_over(ranks), mixer.heads // mixer.kv_heads * mixer.head_dim
    keys = () if mixer.reads_keys else (mixer.head_dim,) * (1 if mixer.keys_are_values else 2)
    group = (heads * (1 + mixer.output_gate), *keys)
    return (
        Matrix("self_attention.linear_qkv", groups * sum(group), width, group if keys else (1,)),
        Matrix("self_attention.linear_proj", width, groups * heads, by_rows=True),
    )


def _linear_attention(width: int, linear: LinearAttention, ranks: int) -> tuple[Matrix, ...]:
    groups = linear.groups_over(ranks)
    values, heads = linear.heads_a_group * linear.value_width, linear.heads_a_group
    shares = (linear.convolved, values, heads, heads)
    return (
        Matrix("self_attention.linear_qkv", groups * linear.projected, width, shares),
        Matrix("self_attention.linear_proj", width, groups * values, by_rows=True),
    )


def _experts(width: int, inner: int, experts: Experts) -> tuple[Matrix, ...]:
    """Return the matrices of experts, their router, and the perceptrons that all tokens go through."""
    return (
        *perceptron("mlp.experts.experts.", width, inner, experts=experts.count, chosen=experts.chosen),
        Matrix("mlp.router", experts.count, width),
        *(perceptron("mlp.shared_experts.", width, experts.shared) if experts.shared else ()),
        *((Matrix("mlp.shared_experts.gate_weight", 1, width),) if experts.shared and experts.shared_gate else ()),
        *(perceptron("mlp.perceptron.", width, experts.beside) if experts.beside else ()),
    )


def _layer_inputs(width: int, inputs: LayerInputs | None) -> tuple[Matrix, ...]:
    """Return the matrices of per-layer inputs; () if there are none."""
    if inputs is None:
        return ()
    return (
        Matrix("input.context", inputs.width, width, is_adaptable=False),
        Matrix("input.gate", inputs.width, width, is_adaptable=False),
        Matrix("input.projection", width, inputs.width, is_adaptable=False),
    )
