"""Shapes of the language model's weights that are no matrices."""

from typing import TYPE_CHECKING

from omnibal_ext.modalities.language.layer import Attention, Layer
from omnibal_ext.modalities.language.linear_attention import LinearAttention
from omnibal_ext.modalities.weights import Shape, layer_norms, norm

if TYPE_CHECKING:
    from omnibal_ext.architectures.architecture import Architecture


def weights(model: "Architecture", kind: str, name: str) -> dict[str, Shape]:
    """Return {name: shape} of weights, other than matrices, that layers of a kind with cost key `name` may have."""
    match kind:
        case "word_embed":
            return _word_embed(model)
        case "llm":
            return _layer(model.language.hidden_size, model.layer(name))
        case _:
            return _head(model)


def _word_embed(model: "Architecture") -> dict[str, Shape]:
    width = model.language.hidden_size
    inputs = model.language.layer_inputs
    return {
        "embedding.weight": (model.language.vocab_size, width),
        "newline": (1, width),
        "inputs_norm": (inputs.width if inputs else 0,),
    }


def _layer(width: int, layer: Layer) -> dict[str, Shape]:
    inputs = layer.layer_inputs
    experts = layer.experts.count if layer.experts else 0
    norms = ("perceptron_norm", "perceptron_after", "experts_norm", "experts_after")
    return {
        **layer_norms(width),
        **{f"mlp.{norm}.weight": (width,) for norm in norms},
        "mlp.router.scale": (width,),
        "mlp.router.expert_scale": (experts,),
        "mlp.router.expert_bias": (experts,),
        "input.table": (inputs.words, inputs.width) if inputs else (0, 0),
        "input.norm.weight": (width,),
        **norm("self_attn_bda.norm", width),
        **norm("mlp_bda.norm", width),
        "scalar": (1,),
        **_mixer(layer.mixer),
    }


def _mixer(mixer: Attention | LinearAttention) -> dict[str, Shape]:
    if isinstance(mixer, Attention):
        queries = norm("self_attention.q_layernorm", mixer.head_dim)
        return queries | norm("self_attention.k_layernorm", mixer.head_dim)
    return {
        "self_attention.convolution": (mixer.groups * mixer.convolved, mixer.kernel),
        "self_attention.a_log": (mixer.heads,),
        "self_attention.dt_bias": (mixer.heads,),
        "self_attention.norm_weight": (mixer.value_width,),
    }


def _head(model: "Architecture") -> dict[str, Shape]:
    width = model.language.hidden_size
    return {**norm("norm", width), "linear.weight": (model.language.vocab_size, width)}
