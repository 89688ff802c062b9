"""Names of the weights of Pixtral's ViT and Mistral 3's merger."""

from collections.abc import Iterator

from omnibal_ext.families.weights import Weight, linear, perceptron


def pixtral_weights() -> Iterator[Weight]:
    """Yield names in files of the weights of Pixtral's ViT, which has no biases."""
    layer = "vision_tower.transformer.layers.{n}"
    yield Weight("patch_embed", "projection.weight", ("vision_tower.patch_conv.weight",), "one_frame")
    yield Weight("patch_embed", "norm.weight", ("vision_tower.ln_pre.weight",))
    yield Weight("vit", "input_layernorm.weight", (f"{layer}.attention_norm.weight",))
    yield Weight("vit", "pre_mlp_layernorm.weight", (f"{layer}.ffn_norm.weight",))
    queries = tuple(f"{layer}.attention.{one}_proj.weight" for one in "qkv")
    yield Weight("vit", "self_attention.linear_qkv.weight", queries, "vision_qkv")
    yield Weight("vit", "self_attention.linear_proj.weight", (f"{layer}.attention.o_proj.weight",))
    yield from perceptron("vit", "mlp", f"{layer}.feed_forward")


def merger_weights() -> Iterator[Weight]:
    """Yield names in files of the weights of Mistral 3's merger, the projector."""
    projector = "multi_modal_projector"
    yield Weight("projector", "norm.weight", (f"{projector}.norm.weight",))
    yield Weight("projector", "merge.weight", (f"{projector}.patch_merger.merging_layer.weight",), "squares")
    yield from linear("projector", "linear_fc1", f"{projector}.linear_1", when="projector_bias")
    yield from linear("projector", "linear_fc2", f"{projector}.linear_2", when="projector_bias")
