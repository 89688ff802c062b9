"""Names of our weights in Hugging Face's files, as data: rows of the families' tables, and rows that many share.

A row: in layers of this kind, our weight is made of these of theirs, in this form, if the model has it. `{n}` is the
number of the layer, `{f}` that of a feature layer, `{e}` that of an expert (a name for each). Names are those of
published checkpoints; other spellings are converted first (`Family.spellings`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from omnibal_ext.modalities.language.layer import Layer


@dataclass(frozen=True)
class Weight:
    """A weight `ours` in layers of `kind`, made of tensors `theirs` by `form` (a name in `megatron.vlm.hf.forms`).
    `when`: a field of the architecture, in language layers of `Layer`, without which the model has no such weight."""

    kind: str
    ours: str
    theirs: tuple[str, ...]
    form: str = "same"
    when: str = ""
    of_layers: Callable[[Layer], object] | None = None
    """Says which language layers have it; None: all."""
    part_of: int | None = None
    """Axis along which theirs concatenates all layers'; None: theirs is of one layer."""


def only(layers: Callable[[Layer], object], weights: Iterable[Weight]) -> Iterator[Weight]:
    """Yield these weights, each restricted to the language layers for which `layers` is true."""
    for weight in weights:
        yield replace(weight, of_layers=layers)


def norm(kind: str, ours: str, theirs: str, when: str = "") -> Iterator[Weight]:
    """Yield names of a norm outside the language model, weight and bias, both there if the field `when` is true.
    Without `when` the weight always is, and the bias if `vision.norm_bias`."""
    yield Weight(kind, f"{ours}.weight", (f"{theirs}.weight",), when=when)
    yield Weight(kind, f"{ours}.bias", (f"{theirs}.bias",), when=when or "vision.norm_bias")


def linear(kind: str, ours: str, theirs: str, when: str = "") -> Iterator[Weight]:
    """Yield names of a linear layer's weight and bias; this exists if the field `when` is true."""
    yield Weight(kind, f"{ours}.weight", (f"{theirs}.weight",))
    yield Weight(kind, f"{ours}.bias", (f"{theirs}.bias",), when=when)


def split_qkv(kind: str, theirs: str, form: str, when: str) -> Iterator[Weight]:
    """Yield names of query, key and value, three linear layers in files; biases exist if the field `when` is true."""
    for which, condition in (("weight", ""), ("bias", when)):
        names = tuple(f"{theirs}{one}_proj.{which}" for one in "qkv")
        yield Weight(kind, f"self_attention.linear_qkv.{which}", names, form, condition)


def embedding(class_token: str, positions: str, patches: str) -> Iterator[Weight]:
    """Yield names of class token, positions and patch embedding of a ViT for square tiles."""
    yield Weight("patch_embed", "class_token", (class_token,), "tokens", "vision.class_token")
    yield Weight("patch_embed", "positions", (positions,), "tokens")
    yield Weight("patch_embed", "projection.weight", (f"{patches}.weight",))
    yield Weight("patch_embed", "projection.bias", (f"{patches}.bias",), when="vision.patch_bias")


def native_blocks() -> Iterator[Weight]:
    """Yield names of the norms and the attention in a layer of Qwen's and GLM's ViTs."""
    layer = "visual.blocks.{n}"
    yield from norm("vit", "input_layernorm", f"{layer}.norm1")
    yield from norm("vit", "pre_mlp_layernorm", f"{layer}.norm2")
    for which, when in (("weight", ""), ("bias", "vision.qkv_bias")):
        qkv = (f"{layer}.attn.qkv.{which}",)
        yield Weight("vit", f"self_attention.linear_qkv.{which}", qkv, "vision_packed_qkv", when)
    yield from linear("vit", "self_attention.linear_proj", f"{layer}.attn.proj", "vision.bias")


def native_perceptron() -> Iterator[Weight]:
    """Yield names of the gated MLP in a ViT layer at native resolution (Qwen2.5-VL, GLM)."""
    mlp = "visual.blocks.{n}.mlp"
    for which, when in (("weight", ""), ("bias", "vision.bias")):
        halves = (f"{mlp}.gate_proj.{which}", f"{mlp}.up_proj.{which}")
        yield Weight("vit", f"mlp.linear_fc1.{which}", halves, "stacked", when)
    yield from linear("vit", "mlp.linear_fc2", f"{mlp}.down_proj", "vision.bias")


def perceptron(kind: str, ours: str, theirs: str) -> Iterator[Weight]:
    """Yield names of a gated MLP without biases: `ours`, and `theirs` in files."""
    halves = (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
    yield Weight(kind, f"{ours}.linear_fc1.weight", halves, "stacked")
    yield Weight(kind, f"{ours}.linear_fc2.weight", (f"{theirs}.down_proj.weight",))


def experts(kind: str, mlp: str, apart: bool, together: str) -> Iterator[Weight]:
    """Yield names of a language layer's router and experts: in files a tensor for each (`apart`), or one for all, which
    has the form `together`."""
    ours = "mlp.experts.experts"
    yield Weight(kind, "mlp.router.weight", (f"{mlp}.gate.weight",))
    if apart:
        halves = (f"{mlp}.experts.{{e}}.gate_proj.weight", f"{mlp}.experts.{{e}}.up_proj.weight")
        yield Weight(kind, f"{ours}.linear_fc1.weight", halves, "stacked_experts")
        yield Weight(kind, f"{ours}.linear_fc2.weight", (f"{mlp}.experts.{{e}}.down_proj.weight",), "experts")
    else:
        yield Weight(kind, f"{ours}.linear_fc1.weight", (f"{mlp}.experts.gate_up_proj",), together)
        yield Weight(kind, f"{ours}.linear_fc2.weight", (f"{mlp}.experts.down_proj",), together)


def llama(branch_norms: bool = False) -> Iterator[Weight]:
    """Yield Llama's names of a dense language model's weights; `branch_norms`: with norms behind attention and MLP,
    where the one before the MLP is `pre_feedforward_layernorm` (Gemma)."""
    yield from all_but_perceptrons(branch_norms)
    yield from perceptron("llm", "mlp", "language_model.model.layers.{n}.mlp")


def llama_of_experts(apart: bool) -> Iterator[Weight]:
    """Yield Llama's names with experts: in files a tensor each (`apart`, Qwen3-MoE), or one for all (Qwen3-VL-MoE)."""
    yield from all_but_perceptrons()
    yield from experts("llm", "language_model.model.layers.{n}.mlp", apart, together="either_way")


def outside_layers() -> Iterator[Weight]:
    """Yield Llama's names of word embedding, last norm and head."""
    yield Weight("word_embed", "embedding.weight", ("language_model.model.embed_tokens.weight",))
    yield Weight("head", "norm.weight", ("language_model.model.norm.weight",))
    yield Weight("head", "linear.weight", ("language_model.lm_head.weight",), when="untied")


def all_but_perceptrons(branch_norms: bool = False) -> Iterator[Weight]:
    """Yield Llama's names of a language model's weights, without MLPs; `branch_norms` as in `llama`."""
    layer = "language_model.model.layers.{n}"
    yield from outside_layers()
    yield Weight("llm", "input_layernorm.weight", (f"{layer}.input_layernorm.weight",))
    yield from split_qkv("llm", f"{layer}.self_attn.", "language_qkv", "mixer.qkv_bias")
    for one in "qk":
        name = f"{layer}.self_attn.{one}_norm.weight"
        yield Weight("llm", f"self_attention.{one}_layernorm.weight", (name,), when="mixer.qk_norm")
    yield Weight("llm", "self_attention.linear_proj.weight", (f"{layer}.self_attn.o_proj.weight",))
    before_mlp = "pre_feedforward" if branch_norms else "post_attention"
    yield Weight("llm", "pre_mlp_layernorm.weight", (f"{layer}.{before_mlp}_layernorm.weight",))
    if branch_norms:
        for branch, theirs in (("self_attn", "post_attention"), ("mlp", "post_feedforward")):
            yield Weight("llm", f"{branch}_bda.norm.weight", (f"{layer}.{theirs}_layernorm.weight",))
