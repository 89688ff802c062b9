"""Names of the weights of InternVL, all but the language model's."""

from collections.abc import Iterator

from omnibal_ext.families.weights import Weight, embedding, linear, norm, split_qkv


def _intern_vit(layer: str, names: dict[str, str]) -> Iterator[Weight]:
    """Yield names of a ViT layer's weights in either form; `names`: of its modules where the two forms differ."""
    yield from norm("vit", "input_layernorm", f"{layer}.{names['norm1']}")
    yield from norm("vit", "pre_mlp_layernorm", f"{layer}.{names['norm2']}")
    yield from linear("vit", "self_attention.linear_proj", f"{layer}.{names['projection']}")
    yield from linear("vit", "mlp.linear_fc1", f"{layer}.mlp.fc1")
    yield from linear("vit", "mlp.linear_fc2", f"{layer}.mlp.fc2")
    yield Weight("vit", "self_attn_bda.scale", (f"{layer}.{names['scale1']}",), when="vision.layer_scale")
    yield Weight("vit", "mlp_bda.scale", (f"{layer}.{names['scale2']}",), when="vision.layer_scale")
    for one in "qk":
        name = f"{layer}.{names['attention']}.{one}_norm.weight"
        yield Weight("vit", f"self_attention.{one}_layernorm.weight", (name,), when="vision.qk_norm")


def internvl_weights() -> Iterator[Weight]:
    """Yield names of the weights but the language model's, in transformers' form."""
    names = {"norm1": "layernorm_before", "norm2": "layernorm_after", "projection": "attention.projection_layer"}
    names |= {"scale1": "lambda_1", "scale2": "lambda_2", "attention": "attention"}
    layer, embeddings = "vision_tower.encoder.layer.{n}", "vision_tower.embeddings"
    yield from embedding(
        f"{embeddings}.cls_token", f"{embeddings}.position_embeddings", f"{embeddings}.patch_embeddings.projection"
    )
    yield from _intern_vit(layer, names)
    yield from split_qkv("vit", f"{layer}.attention.", "vision_qkv", "vision.qkv_bias")
    yield from norm("projector", "vision_norm", "vision_tower.layernorm", when="vision.final_norm")
    yield from norm("projector", "norm", "multi_modal_projector.layer_norm", when="projector_norm")
    yield from linear("projector", "linear_fc1", "multi_modal_projector.linear_1")
    yield from linear("projector", "linear_fc2", "multi_modal_projector.linear_2")


def original_weights() -> Iterator[Weight]:
    """Yield names of the weights but the language model's, in the form of `InternVLChatModel`."""
    names = {"norm1": "norm1", "norm2": "norm2", "projection": "attn.proj"}
    names |= {"scale1": "ls1", "scale2": "ls2", "attention": "attn"}
    layer, embeddings = "vision_model.encoder.layers.{n}", "vision_model.embeddings"
    yield from embedding(
        f"{embeddings}.class_embedding", f"{embeddings}.position_embedding", f"{embeddings}.patch_embedding"
    )
    yield from _intern_vit(layer, names)
    yield Weight("vit", "self_attention.linear_qkv.weight", (f"{layer}.attn.qkv.weight",), "vision_packed_qkv")
    yield Weight(
        "vit", "self_attention.linear_qkv.bias", (f"{layer}.attn.qkv.bias",), "vision_packed_qkv", "vision.qkv_bias"
    )
    yield from norm("projector", "norm", "mlp1.0", when="projector_norm")
    yield from linear("projector", "linear_fc1", "mlp1.1")
    yield from linear("projector", "linear_fc2", "mlp1.3")
