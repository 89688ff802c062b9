"""The linear layers of every kind of layer: shape, tensor-parallel split, and whether it gets an adapter.

Shapes of weights (`megatron.vlm.hf.shapes`), adapters (`omnibal_ext.adapters`), and parameters and products of costs
(`omnibal_ext.costs.works`) are read from here.
"""

from dataclasses import dataclass, replace

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.experts import Experts
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.architectures.layer import Attention, Layer
from omnibal_ext.architectures.linear_attention import LinearAttention
from omnibal_ext.chain import chain_kind

ONE_MATRIX = ("glm4v_text",)
"""Language models whose gate and up projection are one matrix in Hugging Face too, with one adapter."""


@dataclass(frozen=True)
class Matrix:
    """A matrix, whole: [rows, columns], by the name of its module within a layer."""

    name: str
    rows: int
    columns: int
    shares: tuple[int, ...] = (1,)
    """Rows of each matrix of Hugging Face's that it is made of: of gate and up, one behind the other; of query, key and
    value in each group of heads, group by group."""
    by_rows: bool = False
    """Tensor-parallel ranks have parts of its columns, and add up what these give."""
    is_stacked: bool = False
    """It is gate and up, each of which is cut over tensor-parallel ranks."""
    is_adaptable: bool = True
    """It gets a low-rank adapter where its part of the model has them."""
    experts: int = 0
    """Experts that have one each; 0: it is no expert's."""
    chosen: int = 1
    """Of these, those that a token is multiplied with."""

    @property
    def parts(self) -> int:
        """How many matrices of Hugging Face's it is, each with an A of its own."""
        return len(self.shares)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight in our checkpoints: of experts one behind the other."""
        return (self.experts, self.rows, self.columns) if self.experts else (self.rows, self.columns)

    @property
    def weights(self) -> int:
        """Numbers in it, of all experts."""
        return self.rows * self.columns * max(1, self.experts)

    @property
    def multiplied(self) -> int:
        """Numbers that a token is multiplied with."""
        return self.rows * self.columns * self.chosen

    def numbers(self, rank: int, tensor: int = 1) -> float:
        """Numbers in its adapters, on one of `tensor` tensor-parallel ranks; each of these has one of the two whole."""
        rows, columns = (self.rows, self.columns / tensor) if self.by_rows else (self.rows / tensor, self.columns)
        return rank * (self.parts * columns + rows)


def matrices_of(model: Architecture, ranks: int = 1) -> dict[str, tuple[Matrix, ...]]:
    """The matrices of one layer of each kind, by the name that its costs stand under.

    Heads and groups of heads are filled up for so many tensor-parallel `ranks`, among which they are counted together.
    """
    one_matrix = model.types[1] in ONE_MATRIX
    found = {"projector": _projector(model)}
    for name, layer in zip(model.cost_kinds, model.layers, strict=True):
        if name not in found and isinstance(layer, Layer):
            found[name] = language_layer(model.language, layer, ranks, one_matrix)
        elif name not in found and chain_kind(name) == "vit":
            found[name] = _vit(model, ranks)
    return found


def language_layer(
    language: LanguageArchitecture, layer: Layer, ranks: int = 1, one_matrix: bool = False
) -> tuple[Matrix, ...]:
    """Of a language layer; `one_matrix`: gate and up have one adapter. Linear attention's layers have no adapters, and
    among layers with experts attention alone."""
    width = language.hidden_size
    if isinstance(layer.mixer, LinearAttention):
        mixer = _linear_attention(width, layer.mixer, ranks)
    else:
        mixer = _attention(width, layer.mixer, ranks, language.output_gate)
    shares = (1,) if one_matrix else (layer.ffn_hidden_size,) * 2
    feed_forward = (
        _experts(width, layer.ffn_hidden_size, layer.experts)
        if layer.experts
        else _perceptron("mlp.", width, layer.ffn_hidden_size, shares=shares)
    )
    if language.experts or layer.linear:
        feed_forward = tuple(replace(matrix, is_adaptable=False) for matrix in feed_forward)
    return (*mixer, *feed_forward, *_layer_inputs(language))


def _attention(width: int, mixer: Attention, ranks: int, output_gate: bool) -> tuple[Matrix, ...]:
    groups, heads = mixer.groups_over(ranks), mixer.heads // mixer.kv_heads * mixer.head_dim
    keys = () if mixer.reads_keys else (mixer.head_dim,) * (1 if mixer.keys_are_values else 2)
    group = (heads * (1 + output_gate), *keys)
    return (
        Matrix("self_attention.linear_qkv", groups * sum(group), width, group if keys else (1,)),
        Matrix("self_attention.linear_proj", width, groups * heads, by_rows=True),
    )


def _linear_attention(width: int, linear: LinearAttention, ranks: int) -> tuple[Matrix, ...]:
    groups = linear.groups_over(ranks)
    values = groups * linear.heads_a_group * linear.value_width
    return (
        Matrix("self_attention.linear_qkv", groups * linear.projected, width, is_adaptable=False),
        Matrix("self_attention.linear_proj", width, values, by_rows=True, is_adaptable=False),
    )


def _experts(width: int, inner: int, experts: Experts) -> tuple[Matrix, ...]:
    """Experts, their router, and the perceptrons that all tokens go through."""
    return (
        *_perceptron("mlp.experts.experts.", width, inner, experts=experts.count, chosen=experts.chosen),
        Matrix("mlp.router", experts.count, width),
        *(_perceptron("mlp.shared_experts.", width, experts.shared) if experts.shared else ()),
        *((Matrix("mlp.shared_experts.gate_weight", 1, width),) if experts.shared and experts.shared_gate else ()),
        *(_perceptron("mlp.perceptron.", width, experts.beside) if experts.beside else ()),
    )


def _perceptron(
    prefix: str,
    width: int,
    inner: int,
    gated: bool = True,
    shares: tuple[int, ...] = (1,),
    experts: int = 0,
    chosen: int = 1,
) -> tuple[Matrix, ...]:
    opened = Matrix(f"{prefix}linear_fc1", inner * (1 + gated), width, shares, is_stacked=gated)
    closed = Matrix(f"{prefix}linear_fc2", width, inner, by_rows=True)
    return tuple(replace(matrix, experts=experts, chosen=chosen) for matrix in (opened, closed))


def _layer_inputs(language: LanguageArchitecture) -> tuple[Matrix, ...]:
    """Of what a layer reads beside its hidden states."""
    inputs, width = language.layer_inputs, language.hidden_size
    if inputs is None:
        return ()
    return (
        Matrix("input.context", inputs.width, width, is_adaptable=False),
        Matrix("input.gate", inputs.width, width, is_adaptable=False),
        Matrix("input.projection", width, inputs.width, is_adaptable=False),
    )


def _vit(model: Architecture, ranks: int) -> tuple[Matrix, ...]:
    vision = model.vision
    width, inner, head = vision.hidden_size, vision.ffn_hidden_size, vision.hidden_size // vision.heads
    heads = head * vision.heads_over(ranks)
    # Query, key and value are one matrix at Hugging Face's too, but for Gemma 4's and Pixtral's.
    packed = vision.native is not None and not model.pools and model.merger != "matrix"
    return (
        Matrix("self_attention.linear_qkv", 3 * heads, width, (1,) if packed else (head,) * 3),
        Matrix("self_attention.linear_proj", width, heads, by_rows=True),
        *_perceptron("mlp.", width, inner, vision.gated, (inner,) * (1 + vision.gated)),
    )


def _projector(model: Architecture) -> tuple[Matrix, ...]:
    """Without adapters are matrices that merge patches or directly follow that ("gated"), and the only matrix behind
    pooled patches or a norm without a weight."""
    out, joined, width = model.language.hidden_size, model.joined_width, model.vision.hidden_size
    if model.pools or model.merger == "normed":
        return (Matrix("linear", out, joined, is_adaptable=False),)
    if model.merger == "shuffled":
        return (Matrix("linear", out, joined),)
    if model.merger == "matrix":
        merge = Matrix("merge", width, joined, is_adaptable=False)
        return (merge, Matrix("linear_fc1", out, width), Matrix("linear_fc2", out, out, by_rows=True))
    if model.merger == "gated":
        inner = model.merger_width
        bare = (Matrix("merge", out, joined, is_adaptable=False), Matrix("linear", out, out, is_adaptable=False))
        return (*bare, *_perceptron("mlp.", out, inner, shares=(inner, inner)))
    inner = joined if model.vision.native else out
    names = ("", *(f"feature_{number}." for number in range(model.streams - 1)))
    return tuple(
        matrix
        for name in names
        for matrix in (
            Matrix(f"{name}linear_fc1", inner, joined), Matrix(f"{name}linear_fc2", out, inner, by_rows=True)
        )
    )  # fmt: skip
