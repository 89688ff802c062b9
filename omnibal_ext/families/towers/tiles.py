"""ViTs that see square tiles, CLIP and SigLIP among them: their fields, names of weights, and how they are read."""

from collections.abc import Iterator
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.families.fields import GENERAL, SIDE, tower
from omnibal_ext.families.section import ModelType, Section
from omnibal_ext.families.weights import Weight, embedding, linear, norm, split_qkv
from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.reading.checks import listing, shown

ACTIVATIONS = {"gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh"}


TOWERS = {
    "clip_vision_model": ModelType(
        tower(12, 768, 12, 3072, image_size=224, patch_size=32, hidden_act="quick_gelu", layer_norm_eps=1e-5),
        GENERAL | {"projection_dim", "vocab_size"},  # of the text model
    ),
    "siglip_vision_model": ModelType(
        tower(12, 768, 12, 3072, image_size=224, patch_size=16, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-6),
        GENERAL | {"projection_dim", "vision_use_head"},  # of what is not a layer
    ),
}
"""ViTs that several families have, by model type."""


def vision_sizes(tower: Section, layers: int) -> dict[str, Any]:
    """Return fields of a `VisionArchitecture` of which `layers` run. Raises UserError naming an unsupported field."""
    tower.must(num_channels=3, attention_dropout=0.0, hidden_dropout_prob=0.0, projection_dropout=0.0, dropout=0.0)
    hidden_size, heads = tower.take("hidden_size"), tower.take("num_attention_heads")
    if hidden_size % heads:
        raise UserError(f"{tower.where}: hidden_size {hidden_size} does not divide into {heads} heads")
    return {
        "layers": layers,
        "unread": tower.take("num_hidden_layers") - layers,
        "hidden_size": hidden_size,
        "heads": heads,
        "ffn_hidden_size": tower.take("intermediate_size"),
        "image_size": _side(tower, "image_size"),
        "patch_size": _side(tower, "patch_size"),
        "norm_epsilon": tower.take("layer_norm_eps"),
        "activation": tower.choose("hidden_act", ACTIVATIONS),
    }


def _side(tower: Section, name: str) -> int:
    """Return a square's side, given as a number or as [height, width]. Raises UserError if it is no square."""
    sides = tower.take(name, listing(SIDE, 2, 2)) if isinstance(tower[name], list) else [tower.take(name)]
    if len(set(sides)) != 1:
        raise UserError(f"{tower.where}.{name} is {sides}; only squares are supported")
    return sides[0]


def layers_read(tower: Section, feature_layer: Any) -> tuple[int, bool]:
    """Return how many layers must run for the output of `feature_layer`, and whether it is the last one (-1)."""
    layers = tower.take("num_hidden_layers")
    if type(feature_layer) is not int:
        raise UserError(f"{tower.where}: features of several layers ({shown(feature_layer)}) are not supported")
    read = feature_layer if feature_layer >= 0 else layers + 1 + feature_layer
    if not 1 <= read <= layers:
        raise UserError(f"{tower.where}: feature layer {feature_layer} of {layers}; at least one layer must run")
    return read, feature_layer == -1


def clip(tower: Section, feature_layer: Any) -> VisionArchitecture:
    """Read CLIP; `feature_layer`: the layer whose output is its features, or a list of them, to be concatenated."""
    tower.must_be("clip_vision_model")
    several = feature_layer if isinstance(feature_layer, list) and feature_layer else [feature_layer]
    read = [layers_read(tower, one)[0] for one in several]
    layers = sorted(set(read))
    vision = VisionArchitecture(
        **vision_sizes(tower, layers[-1]),
        patch_bias=False,
        pre_norm=True,
        layer_scale=False,
        pixels="clip",
        feature_layers=tuple(layer - 1 for layer in layers[:-1]),
        side_by_side=tuple(map(layers.index, read)) if len(read) > 1 else (),
    )
    tower.refuse_unread()
    return vision


def siglip(tower: Section, layers: int, final_norm: bool = False) -> VisionArchitecture:
    """Read SigLIP, of which `layers` run; `final_norm`: its features are taken behind the last norm."""
    vision = VisionArchitecture(
        **vision_sizes(tower, layers), class_token=False, final_norm=final_norm, layer_scale=False, pixels="half"
    )
    tower.refuse_unread()
    return vision


def clip_weights(last_norm: bool = False) -> Iterator[Weight]:
    """Yield names of CLIP's weights, or SigLIP's (no class token); `last_norm`: features are taken behind that norm."""
    embeddings = "vision_tower.embeddings"
    yield from embedding(
        f"{embeddings}.class_embedding", f"{embeddings}.position_embedding.weight", f"{embeddings}.patch_embedding"
    )
    yield from norm("patch_embed", "norm", "vision_tower.pre_layrnorm", when="vision.pre_norm")
    yield from clip_layer_weights("vision_tower.encoder.layers.{n}")
    if last_norm:
        yield from norm("projector", "vision_norm", "vision_tower.post_layernorm")


def clip_layer_weights(layer: str) -> Iterator[Weight]:
    """Yield names of the weights in a layer of CLIP or SigLIP; `layer`: its own in files, `{n}` for its number."""
    yield from norm("vit", "input_layernorm", f"{layer}.layer_norm1")
    yield from norm("vit", "pre_mlp_layernorm", f"{layer}.layer_norm2")
    yield from split_qkv("vit", f"{layer}.self_attn.", "vision_qkv", "vision.qkv_bias")
    yield from linear("vit", "self_attention.linear_proj", f"{layer}.self_attn.out_proj")
    yield from linear("vit", "mlp.linear_fc1", f"{layer}.mlp.fc1")
    yield from linear("vit", "mlp.linear_fc2", f"{layer}.mlp.fc2")
