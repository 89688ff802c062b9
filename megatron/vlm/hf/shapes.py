"""What shape each of our weights has, by the model alone: what a folder holds is held to it."""

from collections.abc import Callable
from functools import lru_cache, partial

from megatron.vlm.models.vit.clip import MATRICES, SUFFIX
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.chain import DENSE, FAR, FAR_TAKING, KIND_OF, LINEAR, TAKING

Shape = tuple[int, ...]


def weight_shape(ours: str, model: Architecture) -> Shape:
    """The whole shape of a weight by its name in our checkpoints, such as `links.vit_3.mlp.linear_fc1.weight`."""
    _, link, weight = ours.split(".", 2)
    kind, _, number = link.rpartition("_")
    if link in _KINDS:
        return _shapes(link, model)[weight]
    for name, layers in model.layers_apart.items():
        if name in _KINDS and kind == KIND_OF[name] and int(number) in layers:
            kind = name
    return _shapes(kind, model)[weight]


@lru_cache(maxsize=16)
def _shapes(kind: str, model: Architecture) -> dict[str, Shape]:
    return _KINDS[kind](model)


def _linear(name: str, rows: int, columns: int) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _layer(width: int, opened: int, inner: int) -> dict[str, Shape]:
    """Norms and perceptron of a layer; a gated one opens to twice the inner width."""
    return {
        **_norm("input_layernorm", width),
        **_norm("pre_mlp_layernorm", width),
        **_linear("mlp.linear_fc1", opened, width),
        **_linear("mlp.linear_fc2", width, inner),
    }


def _patch_embed(model: Architecture) -> dict[str, Shape]:
    width, patch = model.vision.hidden_size, model.vision.patch_size
    if native := model.vision.native:
        return {
            **_norm("norm", width),
            "projection.weight": (width, 3, native.frames, patch, patch),
            "projection.bias": (width,),
            "positions": ((native.learned_positions or 0) ** 2, width),
            "axis_positions": (2, native.axis_positions or 0, width),
            **_norm("pixel_norm", 3 * patch**2),
            **_norm("place_norm", width),
        }
    return {
        "class_token": (1, 1, width),
        "positions": (model.vision.tokens_per_tile, 1, width),
        "projection.weight": (width, 3, patch, patch),
        "projection.bias": (width,),
        **_norm("norm", width),
    }


def _vit(model: Architecture) -> dict[str, Shape]:
    width, inner = model.vision.hidden_size, model.vision.ffn_hidden_size
    return {
        **_layer(width, inner * (1 + model.vision.gated), inner),
        **_linear("self_attention.linear_qkv", 3 * width, width),
        **_linear("self_attention.linear_proj", width, width),
        **_norm("self_attention.q_layernorm", width // model.vision.heads if model.vision.head_norms else width),
        **_norm("self_attention.k_layernorm", width // model.vision.heads if model.vision.head_norms else width),
        **_norm("self_attn_bda.norm", width),
        **_norm("mlp_bda.norm", width),
        "self_attn_bda.scale": (width,),
        "mlp_bda.scale": (width,),
        **{f"{name}{SUFFIX}.ranges": (parts, 4) for name, parts in MATRICES.items()},
    }


def _projector(model: Architecture) -> dict[str, Shape]:
    width, out = model.vision.hidden_size, model.language.hidden_size
    shuffled = model.joined_width
    if model.vision.native and model.pools:
        return {"shift": (width,), "scale": (width,), **_linear("linear", out, width)}
    if model.merger in ("matrix", "gated"):
        return _merger(model)
    if model.merger == "normed":
        return _linear("linear", out, width)
    if model.vision.native:
        prefixes = ("", *(f"feature_{feature}." for feature in range(len(model.vision.feature_layers))))
        merger = {**_linear("linear_fc1", shuffled, shuffled), **_linear("linear_fc2", out, shuffled)}
        merged = {f"{prefix}{name}": shape for prefix in prefixes for name, shape in merger.items()}
        norms = [_norm(f"{prefix}norm", shuffled if prefix else width) for prefix in prefixes]
        return merged | {name: shape for norm in norms for name, shape in norm.items()}
    return {
        **_norm("vision_norm", width),
        **_norm("norm", shuffled),
        **_linear("linear", out, shuffled),
        **_linear("linear_fc1", out, shuffled),
        **_linear("linear_fc2", out, out),
    }


def _merger(model: Architecture) -> dict[str, Shape]:
    """Of squares that a matrix joins."""
    width, out, inner = model.vision.hidden_size, model.language.hidden_size, model.merger_width
    if model.merger == "matrix":
        return {
            **_norm("norm", width),
            "merge.weight": (width, model.joined_width),
            **_linear("linear_fc1", out, width),
            **_linear("linear_fc2", out, out),
        }
    return {
        **_norm("vision_norm", width),
        **_linear("merge", out, model.joined_width),
        **_linear("linear", out, out),
        **_norm("norm", out),
        **_linear("mlp.linear_fc1", 2 * inner, out),
        **_linear("mlp.linear_fc2", out, inner),
    }


def _word_embed(model: Architecture) -> dict[str, Shape]:
    width = model.language.hidden_size
    inputs = model.language.layer_inputs
    return {
        "embedding.weight": (model.language.vocab_size, width),
        "newline": (1, width),
        "inputs_norm": (inputs.width if inputs else 0,),
    }


def _llm(model: Architecture) -> dict[str, Shape]:
    return _with_attention(model.language)


def _llm_apart(kind: str, model: Architecture) -> dict[str, Shape]:
    return _with_attention(model.language.by_kind[kind])


def _with_attention(language: LanguageArchitecture) -> dict[str, Shape]:
    width, heads = language.hidden_size, language.heads * language.head_dim
    keys = language.kv_heads * language.head_dim * (0 if language.takes_keys else 1 if language.keys_are_values else 2)
    projected, own = heads * (1 + language.output_gate) + keys, language.layer_inputs
    inputs, rows = (own.width, own.words) if own else (0, 0)
    return {
        "input.table": (rows, inputs),
        "input.context.weight": (inputs, width),
        "input.gate.weight": (inputs, width),
        "input.projection.weight": (width, inputs),
        "input.norm.weight": (width,),
        **_perceptrons(language),
        **_linear("self_attention.linear_qkv", projected, width),
        **_linear("self_attention.linear_proj", width, heads),
        **_norm("self_attention.q_layernorm", language.head_dim),
        **_norm("self_attention.k_layernorm", language.head_dim),
        **_norm("self_attn_bda.norm", width),
        **_norm("mlp_bda.norm", width),
        "scalar": (1,),
    }


def _perceptrons(language: LanguageArchitecture) -> dict[str, Shape]:
    """Norms and perceptrons of a layer, and experts."""
    width, inner = language.hidden_size, language.ffn_hidden_size
    own = language.experts
    experts, shared, beside = (own.count, own.shared, own.beside) if own else (0, 0, 0)
    norms = ("perceptron_norm", "perceptron_after", "experts_norm", "experts_after")
    return {
        "mlp.router.weight": (experts, width),
        "mlp.router.scale": (width,),
        "mlp.router.expert_scale": (experts,),
        **_linear("mlp.perceptron.linear_fc1", 2 * beside, width),
        **_linear("mlp.perceptron.linear_fc2", width, beside),
        **{f"mlp.{norm}.weight": (width,) for norm in norms},
        "mlp.router.expert_bias": (experts,),
        "mlp.experts.experts.linear_fc1.weight": (experts, 2 * inner, width),
        "mlp.experts.experts.linear_fc2.weight": (experts, width, inner),
        **_linear("mlp.shared_experts.linear_fc1", 2 * shared, width),
        **_linear("mlp.shared_experts.linear_fc2", width, shared),
        "mlp.shared_experts.gate_weight": (1, width),
        **_layer(width, 2 * inner, inner),
    }


def _llm_dense(model: Architecture) -> dict[str, Shape]:
    inner, width = model.language.without_experts.ffn_hidden_size, model.language.hidden_size
    return _llm(model) | _layer(width, 2 * inner, inner)


def _llm_linear(model: Architecture) -> dict[str, Shape]:
    width, linear = model.language.hidden_size, model.language.linear
    assert linear is not None
    return {
        **_perceptrons(model.language),
        **_linear("self_attention.linear_qkv", linear.groups * linear.projected, width),
        "self_attention.convolution": (linear.groups * linear.convolved, linear.kernel),
        "self_attention.a_log": (linear.heads,),
        "self_attention.dt_bias": (linear.heads,),
        "self_attention.norm_weight": (linear.value_width,),
        **_linear("self_attention.linear_proj", width, linear.heads * linear.value_width),
    }


def _head(model: Architecture) -> dict[str, Shape]:
    width = model.language.hidden_size
    return {**_norm("norm", width), **_linear("linear", model.language.vocab_size, width)}


_KINDS: dict[str, Callable[[Architecture], dict[str, Shape]]] = {
    "patch_embed": _patch_embed,
    "vit": _vit,
    "projector": _projector,
    "word_embed": _word_embed,
    "llm": _llm,
    LINEAR: _llm_linear,
    **{kind: partial(_llm_apart, kind) for kind in (FAR, TAKING, FAR_TAKING)},
    DENSE: _llm_dense,
    "head": _head,
}
