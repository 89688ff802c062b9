"""Names of the weights of Gemma 4, untrained ones included."""

from collections.abc import Iterator
from dataclasses import replace

from omnibal_ext.families.weights import Weight, llama, only, perceptron
from omnibal_ext.modalities.language.layer import Layer

RANGE = ("input_min", "input_max", "output_min", "output_max")
LAYER = "language_model.model.layers.{n}"


def language_weights() -> Iterator[Weight]:
    """Yield names in files of the language model's weights; by layer QKV is whole, without values, or queries alone."""
    for weight in llama(branch_norms=True):
        layers = _has_keys if ".k_layernorm." in weight.ours else None
        if weight.ours.startswith(("mlp.", "pre_mlp_layernorm.")):
            layers = _has_no_experts
        if ".linear_qkv." not in weight.ours:
            yield replace(weight, of_layers=layers)
    queries, keys, values = (f"{LAYER}.self_attn.{one}_proj.weight" for one in "qkv")
    qkv = "self_attention.linear_qkv.weight"
    yield Weight("llm", qkv, (queries, keys, values), "language_qkv", of_layers=_has_values)
    yield Weight(
        "llm", qkv, (queries, keys), "keys_alone", of_layers=lambda one: _has_keys(one) and not _has_values(one)
    )
    yield Weight("llm", qkv, (queries,), of_layers=lambda layer: not _has_keys(layer))
    yield Weight("llm", "scalar", (f"{LAYER}.layer_scalar",))
    yield from only(lambda layer: layer.experts, _mixture())
    yield from only(lambda layer: layer.layer_inputs, _layer_input())
    norm = "language_model.model.per_layer_projection_norm.weight"
    yield Weight("word_embed", "inputs_norm", (norm,), when="language.layer_inputs")


def _has_no_experts(layer: Layer) -> bool:
    return layer.experts is None


def _has_keys(layer: Layer) -> bool:
    return layer.keys_from is None


def _has_values(layer: Layer) -> bool:
    return _has_keys(layer) and layer.attention is not None and not layer.attention.keys_are_values


def _layer_input() -> Iterator[Weight]:
    """Yield names of per-layer inputs' weights; files have tables and context matrices of all layers as one tensor."""
    model = "language_model.model"
    yield Weight("llm", "input.table", (f"{model}.embed_tokens_per_layer.weight",), part_of=1)
    yield Weight("llm", "input.context.weight", (f"{model}.per_layer_model_projection.weight",), part_of=0)
    yield Weight("llm", "input.gate.weight", (f"{LAYER}.per_layer_input_gate.weight",))
    yield Weight("llm", "input.projection.weight", (f"{LAYER}.per_layer_projection.weight",))
    yield Weight("llm", "input.norm.weight", (f"{LAYER}.post_per_layer_input_norm.weight",))


def _mixture() -> Iterator[Weight]:
    """Yield names of the weights of experts and of the MLP next to them, which has a dense layer's names in files."""
    yield Weight("llm", "mlp.router.weight", (f"{LAYER}.router.proj.weight",))
    yield Weight("llm", "mlp.router.scale", (f"{LAYER}.router.scale",))
    yield Weight("llm", "mlp.router.expert_scale", (f"{LAYER}.router.per_expert_scale",))
    yield Weight("llm", "mlp.experts.experts.linear_fc1.weight", (f"{LAYER}.experts.gate_up_proj",))
    yield Weight("llm", "mlp.experts.experts.linear_fc2.weight", (f"{LAYER}.experts.down_proj",))
    yield from perceptron("llm", "mlp.perceptron", f"{LAYER}.mlp")
    norms = {"perceptron_norm": "pre_feedforward_layernorm", "perceptron_after": "post_feedforward_layernorm_1"}
    norms |= {"experts_norm": "pre_feedforward_layernorm_2", "experts_after": "post_feedforward_layernorm_2"}
    for ours, theirs in norms.items():
        yield Weight("llm", f"mlp.{ours}.weight", (f"{LAYER}.{theirs}.weight",))


def vision_weights() -> Iterator[Weight]:
    """Yield names in files of the weights of ViT and projector."""
    embedder, layer = "vision_tower.patch_embedder", "vision_tower.encoder.layers.{n}"
    yield Weight("patch_embed", "projection.weight", (f"{embedder}.input_proj.weight",), "patches")
    yield Weight("patch_embed", "axis_positions", (f"{embedder}.position_embedding_table",))
    norms = {"input_layernorm": "input", "pre_mlp_layernorm": "pre_feedforward"}
    norms |= {"self_attn_bda.norm": "post_attention", "mlp_bda.norm": "post_feedforward"}
    for ours, theirs in norms.items():
        yield Weight("vit", f"{ours}.weight", (f"{layer}.{theirs}_layernorm.weight",))
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    queries = tuple(f"{attention}.{one}_proj.linear.weight" for one in "qkv")
    yield Weight("vit", "self_attention.linear_qkv.weight", queries, "vision_qkv")
    for one in "qk":
        yield Weight("vit", f"self_attention.{one}_layernorm.weight", (f"{attention}.{one}_norm.weight",))
    yield Weight("vit", "self_attention.linear_proj.weight", (f"{attention}.o_proj.linear.weight",))
    halves = (f"{mlp}.gate_proj.linear.weight", f"{mlp}.up_proj.linear.weight")
    yield Weight("vit", "mlp.linear_fc1.weight", halves, "stacked")
    yield Weight("vit", "mlp.linear_fc2.weight", (f"{mlp}.down_proj.linear.weight",))
    joined = {"linear_qkv": (attention, "q", "k", "v"), "linear_proj": (attention, "o")}
    joined |= {"linear_fc1": (mlp, "gate", "up"), "linear_fc2": (mlp, "down")}
    for ours, (where, *matrices) in joined.items():
        ranges = tuple(f"{where}.{matrix}_proj.{end}" for matrix in matrices for end in RANGE)
        yield Weight("vit", f"{ours}_clip.ranges", ranges, "ranges", when="vision.clipped")
    yield Weight("projector", "shift", ("vision_tower.std_bias",), when="vision.standardized")
    yield Weight("projector", "scale", ("vision_tower.std_scale",), when="vision.standardized")
    yield Weight("projector", "linear.weight", ("embed_vision.embedding_projection.weight",))
