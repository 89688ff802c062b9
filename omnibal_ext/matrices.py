"""The linear layers of every kind of layer: shape, tensor-parallel split, and whether it gets an adapter.

Used for shapes of weights (`megatron.vlm.hf.shapes`), adapters (`omnibal_ext.adapters`) and costs
(`omnibal_ext.costs.works`).
"""

from dataclasses import dataclass, replace

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.audio import AudioArchitecture
from omnibal_ext.architectures.experts import Experts
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.architectures.layer import Attention, Layer
from omnibal_ext.architectures.linear_attention import LinearAttention
from omnibal_ext.chain import chain_kind
from omnibal_ext.families.registry import MODELS, PARTS


@dataclass(frozen=True)
class Matrix:
    """An unsharded matrix [rows, columns]; `name` is that of its module within a layer."""

    name: str
    rows: int
    columns: int
    shares: tuple[int, ...] = (1,)
    """Rows of the Hugging Face matrices that it concatenates: gate, up; or, of each group of heads, query, key, value,
    and of linear attention what is convolved, gates, rates, decays: group by group."""
    by_rows: bool = False
    """Megatron's RowParallelLinear: tensor-parallel ranks have parts of the columns, and outputs are summed."""
    is_stacked: bool = False
    """It is gate and up, each sharded over tensor-parallel ranks."""
    is_adaptable: bool = True
    """It gets an adapter if its part of the model has them."""
    experts: int = 0
    """Number of experts that have one each; 0: it is not in an expert."""
    chosen: int = 1
    """Number of these experts that a token goes through."""

    @property
    def parts(self) -> int:
        """Number of Hugging Face matrices that it concatenates, each with its own A."""
        return len(self.shares)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight in our checkpoints; those of experts are stacked."""
        return (self.experts, self.rows, self.columns) if self.experts else (self.rows, self.columns)

    @property
    def weights(self) -> int:
        """Parameters, of all experts."""
        return self.rows * self.columns * max(1, self.experts)

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with."""
        return self.rows * self.columns * self.chosen

    def numbers(self, rank: int, tensor: int = 1) -> float:
        """Return the adapters' parameters on one of `tensor` tensor-parallel ranks, which shards one of A and B."""
        rows, columns = (self.rows, self.columns / tensor) if self.by_rows else (self.rows / tensor, self.columns)
        return rank * (self.parts * columns + rows)


def matrices_of(model: Architecture, ranks: int = 1) -> dict[str, tuple[Matrix, ...]]:
    """Return the unsharded matrices of one layer of each kind, by its cost key (`chain.cost_kinds`).

    Heads and groups of heads are padded to divide over `ranks` tensor-parallel ranks.
    """
    gate_and_up = [weight.theirs for weight in PARTS[model.types[1]].weights if weight.ours == "mlp.linear_fc1.weight"]
    one_matrix = any(len(theirs) == 1 for theirs in gate_and_up)
    found = {"projector": _projector(model)}
    if model.audio:
        found |= {"audio": _audio(model.audio, ranks), "audio_projector": _audio_projector(model)}
    for name, layer in zip(model.cost_kinds, model.layers, strict=True):
        if name not in found and isinstance(layer, Layer):
            found[name] = language_layer(model.language, layer, ranks, one_matrix)
        elif name not in found and chain_kind(name) == "vit":
            found[name] = _vit(model, ranks)
    return found


def language_layer(
    language: LanguageArchitecture, layer: Layer, ranks: int = 1, one_matrix: bool = False
) -> tuple[Matrix, ...]:
    """Return a language layer's matrices; `one_matrix`: gate and up are one in Hugging Face too, with one adapter.

    In models with experts only attention has adapters, linear attention too.
    """
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
    if language.experts:
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
    values, heads = linear.heads_a_group * linear.value_width, linear.heads_a_group
    shares = (linear.convolved, values, heads, heads)
    return (
        Matrix("self_attention.linear_qkv", groups * linear.projected, width, shares),
        Matrix("self_attention.linear_proj", width, groups * values, by_rows=True),
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
    """Matrices of per-layer inputs (`LayerInputs`)."""
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
    tower = MODELS[model.types[0]].part.weights
    qkv = [weight for weight in tower if (weight.kind, weight.ours) == ("vit", "self_attention.linear_qkv.weight")]
    packed = vision.native is not None and all(len(weight.theirs) == 1 for weight in qkv)
    return (
        Matrix("self_attention.linear_qkv", 3 * heads, width, (1,) if packed else (head,) * 3),
        Matrix("self_attention.linear_proj", width, heads, by_rows=True),
        *_perceptron("mlp.", width, inner, vision.gated, (inner,) * (1 + vision.gated)),
    )


def _audio(audio: AudioArchitecture, ranks: int) -> tuple[Matrix, ...]:
    width, head = audio.hidden_size, audio.hidden_size // audio.heads
    heads = head * audio.as_vit.heads_over(ranks)
    return (
        Matrix("self_attention.linear_qkv", 3 * heads, width, (head,) * 3),
        Matrix("self_attention.linear_proj", width, heads, by_rows=True),
        *_perceptron("mlp.", width, audio.ffn_hidden_size, gated=False),
    )


def _audio_projector(model: Architecture) -> tuple[Matrix, ...]:
    assert model.audio is not None
    width, out = model.audio.hidden_size, model.language.hidden_size
    if model.audio.pooled:
        return (Matrix("linear", out, width),)
    return (Matrix("linear_fc1", width, width), Matrix("linear_fc2", out, width, by_rows=True))


def _projector(model: Architecture) -> tuple[Matrix, ...]:
    """No adapters: matrices that merge patches, the one that follows in "gated", and the only matrix after pooling or
    a norm without a weight."""
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
