"""Names of the weights of GLM-V: its ViT and merger, GLM-4's layers, and those of its mixtures."""

from collections.abc import Iterator

from omnibal_ext.families.weights import (
    Weight,
    all_but_perceptrons,
    experts,
    linear,
    native_blocks,
    native_perceptron,
    only,
    outside_layers,
    perceptron,
    split_qkv,
)

LAYER = "language_model.model.layers.{n}"


def vision_weights() -> Iterator[Weight]:
    """Yield names of the weights of ViT and merger. GLM-OCR's ViT has other norms, and no learned positions."""
    layer, merger = "visual.blocks.{n}", "visual.merger"
    yield from linear("patch_embed", "projection", "visual.patch_embed.proj")
    yield Weight("patch_embed", "norm.weight", ("visual.post_conv_layernorm.weight",), when="vision.pre_norm")
    positions = ("visual.embeddings.position_embedding.weight",)
    yield Weight("patch_embed", "positions", positions, when="vision.native.learned_positions")
    yield from native_blocks()
    for one in "qk":
        name = f"{layer}.attn.{one}_norm.weight"
        yield Weight("vit", f"self_attention.{one}_layernorm.weight", (name,), when="vision.query_key_norms")
    yield from native_perceptron()
    yield Weight("projector", "vision_norm.weight", ("visual.post_layernorm.weight",))
    yield Weight("projector", "merge.weight", ("visual.downsample.weight",), "squares")
    yield Weight("projector", "merge.bias", ("visual.downsample.bias",))
    yield Weight("projector", "linear.weight", (f"{merger}.proj.weight",))
    yield from linear("projector", "norm", f"{merger}.post_projection_norm")
    yield from perceptron("projector", "mlp", merger)


def dense_weights() -> Iterator[Weight]:
    """Yield names of the weights of GLM-4's language model, where RoPE rotates neighbours, and gate and up are one."""
    yield from outside_layers()
    norms = {"input_layernorm": "input", "self_attn_bda.norm": "post_self_attn"}
    norms |= {"pre_mlp_layernorm": "post_attention", "mlp_bda.norm": "post_mlp"}
    for ours, theirs in norms.items():
        yield Weight("llm", f"{ours}.weight", (f"{LAYER}.{theirs}_layernorm.weight",))
    yield from split_qkv("llm", f"{LAYER}.self_attn.", "neighbours_qkv", "mixer.qkv_bias")
    yield Weight("llm", "self_attention.linear_proj.weight", (f"{LAYER}.self_attn.o_proj.weight",))
    yield Weight("llm", "mlp.linear_fc1.weight", (f"{LAYER}.mlp.gate_up_proj.weight",))
    yield Weight("llm", "mlp.linear_fc2.weight", (f"{LAYER}.mlp.down_proj.weight",))


def mixture_weights(apart: bool) -> Iterator[Weight]:
    """Yield names of the weights: MLPs in the first layers, then experts (`apart`: a tensor each) and a shared one."""
    yield from all_but_perceptrons()
    yield from only(lambda layer: not layer.experts, perceptron("llm", "mlp", f"{LAYER}.mlp"))
    yield from only(lambda layer: layer.experts, _experts(apart))


def _experts(apart: bool) -> Iterator[Weight]:
    yield from experts("llm", f"{LAYER}.mlp", apart, together="same")
    yield Weight("llm", "mlp.router.expert_bias", (f"{LAYER}.mlp.gate.e_score_correction_bias",))
    yield from perceptron("llm", "mlp.shared_experts", f"{LAYER}.mlp.shared_experts")
