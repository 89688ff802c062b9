"""A language model as hashes have it.

Datasets, profiles and plans note hashes. Those of models of older families have the names and values that were fields
before a model was a list of layers: what its layers share once, what some have of their own with their numbers.
"""

from collections.abc import Sequence
from typing import Any

from omnibal_ext.modalities.fields import hashed
from omnibal_ext.modalities.language.architecture import LanguageArchitecture, Older
from omnibal_ext.modalities.language.layer import Attention, Layer

OTHERS = {
    "each_layer", "older", "mixer", "keys_from", "head_dim", "rope", "window", "keys_are_values", "reads_keys",
    "sees_images", "images_whole", "sees_prefix",
}  # fmt: skip
"""Fields that hashes of older families have by other names."""


def noted(language: LanguageArchitecture) -> dict[str, Any]:
    """Return a language model's fields as its hash has them, by name; those added later only where not at their
    default."""
    if language.older is None or not language.attentions:  # none: a few layers of a model
        return hashed(language) | {"each_layer": [hashed(layer) for layer in language.each_layer]}
    return _in_older_names(language, language.older)


def _in_older_names(language: LanguageArchitecture, older: Older) -> dict[str, Any]:
    layers, usual, attentions = language.each_layer, language.usual, language.attentions
    near, far = ([one for one in attentions if bool(one.window) == slides] for slides in (True, False))
    first = (near or far)[0]
    rope = far[0].rope if far else older.far_rope or first.rope
    says_head = older.head_said or first.head_dim != language.hidden_size // first.heads
    dense = [one.ffn_hidden_size for one in layers if not one.experts]
    linear = [number for number, one in enumerate(layers) if one.linear]
    found = {
        **{name: value for part in (language, usual, first) for name, value in hashed(part).items()},
        "layers": len(layers),
        "head_size": first.head_dim if says_head else None,
        "rope_theta": rope.theta,
        "rope_scaling": hashed(rope.scaling),
        "rotary_sections": rope.sections,
        "rotary_interleaved": rope.interleaved,
        "rotated": rope.rotated,
        "sliding": _sliding(layers, near[0]) if near else None,
        "image_attention": any(one.sees_images for one in attentions),
        "linear": hashed(layers[linear[0]].linear) | {"layers": linear} if linear else None,
    }
    if usual.experts and dense:
        found["experts"] |= {"dense_layers": len(dense), "dense_width": dense[0]}
    if first.sees_prefix:
        found["prefix_attention"] = True
    if far and first.value_norm:  # Gemma 4, also where both kinds of layers have the same heads
        heads = {"kv_heads": far[0].kv_heads, "head_size": far[0].head_dim}
        found["far"] = heads | {"keys_are_values": far[0].keys_are_values}
    if taking := [one.ffn_hidden_size for one in layers if one.keys_from is not None]:
        found["shared_keys"] = {"layers": len(taking), "widens": taking[0] != usual.ffn_hidden_size}
    return {name: value for name, value in found.items() if name not in OTHERS}


def _sliding(layers: Sequence[Layer], near: Attention) -> dict[str, Any]:
    numbers = [number for number, one in enumerate(layers) if one.attention and one.attention.window]
    found = {"tokens": near.window, "layers": numbers, "theta": near.rope.theta}
    if near.value_norm:  # Gemma 4, also where images are not seen in both directions
        found["images_whole" if near.images_whole else "images_here_alone"] = True
    return found
