"""Names of the weights of Qwen3.5's language model; its ViT's are Qwen3-VL's."""

from collections.abc import Iterator

from omnibal_ext.families.weights import Weight, experts, only, outside_layers, perceptron


def language_weights(mixture: bool, apart: bool = False) -> Iterator[Weight]:
    """Yield names of the language model's weights; `mixture`: experts for MLPs, `apart`: a tensor for each in files."""
    layer = "language_model.model.layers.{n}"
    attention, net = f"{layer}.self_attn", f"{layer}.linear_attn"
    yield from outside_layers()
    yield Weight("llm", "input_layernorm.weight", (f"{layer}.input_layernorm.weight",))
    yield Weight("llm", "pre_mlp_layernorm.weight", (f"{layer}.post_attention_layernorm.weight",))
    yield from _with_shared_expert(apart) if mixture else perceptron("llm", "mlp", f"{layer}.mlp")
    yield from only(lambda one: one.attention, _attention(attention))
    yield from only(lambda one: one.linear, _linear_attention(net))


def _attention(attention: str) -> Iterator[Weight]:
    queries = tuple(f"{attention}.{one}_proj.weight" for one in "qkv")
    yield Weight("llm", "self_attention.linear_qkv.weight", queries, "gated_qkv")
    for one in "qk":
        yield Weight("llm", f"self_attention.{one}_layernorm.weight", (f"{attention}.{one}_norm.weight",))
    yield Weight("llm", "self_attention.linear_proj.weight", (f"{attention}.o_proj.weight",))


def _linear_attention(net: str) -> Iterator[Weight]:
    projected = tuple(f"{net}.in_proj_{which}.weight" for which in ("qkv", "z", "b", "a"))
    yield Weight("llm", "self_attention.linear_qkv.weight", projected, "linear")
    yield Weight("llm", "self_attention.convolution", (f"{net}.conv1d.weight",), "convolution")
    yield Weight("llm", "self_attention.a_log", (f"{net}.A_log",))
    yield Weight("llm", "self_attention.dt_bias", (f"{net}.dt_bias",))
    yield Weight("llm", "self_attention.norm_weight", (f"{net}.norm.weight",))
    yield Weight("llm", "self_attention.linear_proj.weight", (f"{net}.out_proj.weight",))


def _with_shared_expert(apart: bool) -> Iterator[Weight]:
    mlp = "language_model.model.layers.{n}.mlp"
    yield from experts("llm", mlp, apart, together="same")
    yield from perceptron("llm", "mlp.shared_experts", f"{mlp}.shared_expert")
    yield Weight("llm", "mlp.shared_experts.gate_weight", (f"{mlp}.shared_expert_gate.weight",))
