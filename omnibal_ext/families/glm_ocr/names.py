"""Names of the weights of GLM-OCR's ViT and merger."""

from collections.abc import Iterator

from omnibal_ext.families.glm_v.names import merger_weights
from omnibal_ext.families.weights import Weight, linear


def vision_weights() -> Iterator[Weight]:
    """Of all but the language model."""
    layer = "visual.blocks.{n}"
    yield from linear("patch_embed", "projection", "visual.patch_embed.proj")
    yield Weight("vit", "input_layernorm.weight", (f"{layer}.norm1.weight",))
    yield Weight("vit", "pre_mlp_layernorm.weight", (f"{layer}.norm2.weight",))
    for one in "qk":
        yield Weight("vit", f"self_attention.{one}_layernorm.weight", (f"{layer}.attn.{one}_norm.weight",))
    for part, when in (("weight", ""), ("bias", "vision.bias")):
        qkv, halves = (f"{layer}.attn.qkv.{part}",), tuple(f"{layer}.mlp.{one}_proj.{part}" for one in ("gate", "up"))
        yield Weight("vit", f"self_attention.linear_qkv.{part}", qkv, "vision_packed_qkv", when)
        yield Weight("vit", f"mlp.linear_fc1.{part}", halves, "stacked", when)
    yield from linear("vit", "self_attention.linear_proj", f"{layer}.attn.proj", "vision.bias")
    yield from linear("vit", "mlp.linear_fc2", f"{layer}.mlp.down_proj", "vision.bias")
    yield from merger_weights()
