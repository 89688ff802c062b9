"""The shape of each of our weights, from the architecture; weights of a folder are checked against it."""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

from megatron.vlm.families.gemma4.clip import MATRICES, SUFFIX
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.audio import AudioArchitecture
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.architectures.layer import Attention, Layer
from omnibal_ext.architectures.linear_attention import LinearAttention
from omnibal_ext.chain import chain_kind, layer_names
from omnibal_ext.matrices import Matrix, matrices_of

Shape = tuple[int, ...]


def weight_shape(ours: str, model: Architecture) -> Shape:
    """The unsharded shape of a weight, by name in our checkpoints, such as `links.vit_3.mlp.linear_fc1.weight`."""
    _, link, weight = ours.split(".", 2)
    return _shapes(_cost_kinds(model)[link], model)[weight]


@lru_cache(maxsize=16)
def _cost_kinds(model: Architecture) -> dict[str, str]:
    """Cost key of every link, by its name in checkpoints, such as `vit_3`."""
    names = (name.replace(".", "_") for name in layer_names(model.chain))
    return dict(zip(names, model.cost_kinds, strict=True))


@lru_cache(maxsize=16)
def _shapes(name: str, model: Architecture) -> dict[str, Shape]:
    """All weights of a layer with this cost key."""
    kind = chain_kind(name)
    found = _language_layer(model.language, model.layer(name)) if kind == "llm" else _WEIGHTS[kind](model)
    for matrix in matrices_of(model).get(name, ()):
        found |= _matrix(matrix)
    return found


def _matrix(matrix: Matrix) -> dict[str, Shape]:
    if matrix.name.endswith("_weight"):
        return {matrix.name: matrix.shape}
    return {f"{matrix.name}.weight": matrix.shape, f"{matrix.name}.bias": matrix.shape[:-1]}


def _norm(name: str, width: int) -> dict[str, Shape]:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _layer_norms(width: int) -> dict[str, Shape]:
    return _norm("input_layernorm", width) | _norm("pre_mlp_layernorm", width)


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
    width = model.vision.hidden_size
    normed = width // model.vision.heads if model.vision.norms_heads else width
    return {
        **_layer_norms(width),
        **_norm("self_attention.q_layernorm", normed),
        **_norm("self_attention.k_layernorm", normed),
        **_norm("self_attn_bda.norm", width),
        **_norm("mlp_bda.norm", width),
        "self_attn_bda.scale": (width,),
        "mlp_bda.scale": (width,),
        **{f"{name}{SUFFIX}.ranges": (parts, 4) for name, parts in MATRICES.items()},
    }


def _projector(model: Architecture) -> dict[str, Shape]:
    """Norms, as wide as their input."""
    width, out, joined = model.vision.hidden_size, model.language.hidden_size, model.joined_width
    if model.vision.native is None:
        return _norm("vision_norm", width) | _norm("norm", joined)
    if model.pools:
        return {"shift": (width,), "scale": (width,)}
    found = _norm("vision_norm", width) | _norm("norm", out if model.merger == "gated" else width)
    for feature in range(model.streams - 1):
        found |= _norm(f"feature_{feature}.norm", joined)
    return found


def _audio_embed(model: Architecture) -> dict[str, Shape]:
    audio = _audio(model)
    widths = (1, *[audio.channels] * 3) if audio.channels else (audio.mel_bins, audio.hidden_size, audio.hidden_size)
    found: dict[str, Shape] = {"projection.weight": (audio.hidden_size, audio.channels * audio.halved(audio.mel_bins))}
    for number, (before, after) in enumerate(pairwise(widths)):
        side = (3, 3) if audio.channels else (3,)
        found |= {f"convolutions.{number}.weight": (after, before, *side), f"convolutions.{number}.bias": (after,)}
    return found


def _audio(model: Architecture) -> AudioArchitecture:
    assert model.audio is not None
    return model.audio


def _word_embed(model: Architecture) -> dict[str, Shape]:
    width = model.language.hidden_size
    inputs = model.language.layer_inputs
    return {
        "embedding.weight": (model.language.vocab_size, width),
        "newline": (1, width),
        "inputs_norm": (inputs.width if inputs else 0,),
    }


def _language_layer(language: LanguageArchitecture, layer: Layer) -> dict[str, Shape]:
    width, inputs = language.hidden_size, language.layer_inputs
    experts = layer.experts.count if layer.experts else 0
    norms = ("perceptron_norm", "perceptron_after", "experts_norm", "experts_after")
    return {
        **_layer_norms(width),
        **{f"mlp.{norm}.weight": (width,) for norm in norms},
        "mlp.router.scale": (width,),
        "mlp.router.expert_scale": (experts,),
        "mlp.router.expert_bias": (experts,),
        "input.table": (inputs.words, inputs.width) if inputs else (0, 0),
        "input.norm.weight": (width,),
        **_norm("self_attn_bda.norm", width),
        **_norm("mlp_bda.norm", width),
        "scalar": (1,),
        **_mixer(layer.mixer),
    }


def _mixer(mixer: Attention | LinearAttention) -> dict[str, Shape]:
    if isinstance(mixer, Attention):
        queries = _norm("self_attention.q_layernorm", mixer.head_dim)
        return queries | _norm("self_attention.k_layernorm", mixer.head_dim)
    return {
        "self_attention.convolution": (mixer.groups * mixer.convolved, mixer.kernel),
        "self_attention.a_log": (mixer.heads,),
        "self_attention.dt_bias": (mixer.heads,),
        "self_attention.norm_weight": (mixer.value_width,),
    }


def _head(model: Architecture) -> dict[str, Shape]:
    width = model.language.hidden_size
    return {**_norm("norm", width), "linear.weight": (model.language.vocab_size, width)}


_WEIGHTS: dict[str, Callable[[Architecture], dict[str, Shape]]] = {
    "audio_embed": _audio_embed,
    "audio": lambda model: _layer_norms(_audio(model).hidden_size),
    "audio_projector": lambda model: _norm("norm", _audio(model).hidden_size),
    "patch_embed": _patch_embed,
    "vit": _vit,
    "projector": _projector,
    "word_embed": _word_embed,
    "head": _head,
}
"""Weights that are not in `matrices_of`, of all but language layers."""
