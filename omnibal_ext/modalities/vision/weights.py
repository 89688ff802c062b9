"""Shapes of a ViT's weights, and its projector's, that are no matrices."""

from typing import TYPE_CHECKING

from omnibal_ext.modalities.weights import Shape, layer_norms, norm

if TYPE_CHECKING:
    from omnibal_ext.architectures.architecture import Architecture

CLIPPED = {"linear_qkv": 3, "linear_proj": 1, "linear_fc1": 2, "linear_fc2": 1}
"""The linear layers of a layer whose inputs and outputs may be clamped; how many Hugging Face matrices each joins."""
CLIP_SUFFIX = "_clip"
"""Suffix of the name of a linear layer's ranges."""


def weights(model: "Architecture", kind: str, name: str) -> dict[str, Shape]:
    """Return {name: shape} of weights, other than matrices, that layers of a kind with cost key `name` may have."""
    return {"patch_embed": _embed, "vit": _layer, "projector": _projector}[kind](model)


def _embed(model: "Architecture") -> dict[str, Shape]:
    width, patch = model.vision.hidden_size, model.vision.patch_size
    if native := model.vision.native:
        return {
            **norm("norm", width),
            "projection.weight": (width, 3, native.frames, patch, patch),
            "projection.bias": (width,),
            "positions": ((native.learned_positions or 0) ** 2, width),
            "axis_positions": (2, native.axis_positions or 0, width),
            **norm("pixel_norm", 3 * patch**2),
            **norm("place_norm", width),
        }
    return {
        "class_token": (1, 1, width),
        "positions": (model.vision.tokens_per_tile, 1, width),
        "projection.weight": (width, 3, patch, patch),
        "projection.bias": (width,),
        **norm("norm", width),
    }


def _layer(model: "Architecture") -> dict[str, Shape]:
    width = model.vision.hidden_size
    normed = width // model.vision.heads if model.vision.norms_heads else width
    return {
        **layer_norms(width),
        **norm("self_attention.q_layernorm", normed),
        **norm("self_attention.k_layernorm", normed),
        **norm("self_attn_bda.norm", width),
        **norm("mlp_bda.norm", width),
        "self_attn_bda.scale": (width,),
        "mlp_bda.scale": (width,),
        **{f"{name}{CLIP_SUFFIX}.ranges": (parts, 4) for name, parts in CLIPPED.items()},
    }


def _projector(model: "Architecture") -> dict[str, Shape]:
    """Return {name: shape} of the projector's norms, as wide as their input; after pooling of shift and scale."""
    width, out, joined = model.vision.hidden_size, model.language.hidden_size, model.joined_width
    if model.vision.native is None:
        return norm("vision_norm", width) | norm("norm", joined)
    if model.pools:
        return {"shift": (width,), "scale": (width,)}
    found = norm("vision_norm", width) | norm("norm", out if model.merger == "gated" else width)
    for feature in range(model.streams - 1):
        found |= norm(f"feature_{feature}.norm", joined)
    return found
