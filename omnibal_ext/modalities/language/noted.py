"""A language model by the names that hashes have: those of fields that a model had before it was a list of layers.

Datasets, profiles and plans note these hashes, so that names and values stay: what layers share is named once, and what
some have of their own by the numbers of these layers.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from omnibal_ext.modalities.fields import hashed
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.layer import Attention, Layer

APART = {
    "each_layer", "head_said", "far_rope", "mixer", "ffn_hidden_size", "experts", "keys_from", "kv_heads", "head_dim",
    "rope", "window", "keys_are_values", "reads_keys", "sees_images", "images_whole", "sees_prefix",
}  # fmt: skip
"""Fields that hashes have by other names, or that layers may have of their own."""


def noted(language: LanguageArchitecture) -> dict[str, Any]:
    """Return what hashes have of a language model; fields that came later only where they are not the default."""
    layers, usual, attentions = language.each_layer, language.usual, language.attentions
    near = [one for one in attentions if one.window]
    far = [one for one in attentions if not one.window]
    first = (near or far)[0]
    rope = far[0].rope if far else language.far_rope or first.rope
    says_head = language.head_said or first.head_dim != language.hidden_size // first.heads
    found = {
        **_shared(language),
        **_shared(usual),
        **_shared(first),
        "layers": len(layers),
        "kv_heads": first.kv_heads,
        "head_size": first.head_dim if says_head else None,
        "ffn_hidden_size": usual.ffn_hidden_size,
        "rope_theta": rope.theta,
        "rope_scaling": hashed(rope.scaling),
        "rotary_sections": rope.sections,
        "rotary_interleaved": rope.interleaved,
        "rotated": rope.rotated,
        "sliding": _sliding(layers, near[0]) if near else None,
        "image_attention": any(one.sees_images for one in attentions),
        "experts": _experts(layers, usual),
        "linear": _linear(layers),
    }
    if first.sees_prefix:
        found["prefix_attention"] = True
    if far and first.value_norm:  # Gemma 4, also where both kinds of layers have the same heads
        names = {"kv_heads": "kv_heads", "head_size": "head_dim", "keys_are_values": "keys_are_values"}
        found["far"] = {name: getattr(far[0], field) for name, field in names.items()}
    if taking := [one for one in layers if one.keys_from is not None]:
        widens = taking[0].ffn_hidden_size != usual.ffn_hidden_size
        found["shared_keys"] = {"layers": len(taking), "widens": widens}
    if _differ_otherwise(layers, attentions):
        found["each_layer"] = [hashed(layer) for layer in layers]
    return found


def _shared(part: LanguageArchitecture | Layer | Attention) -> dict[str, Any]:
    return {name: value for name, value in hashed(part).items() if name not in APART}


def _sliding(layers: Sequence[Layer], near: Attention) -> dict[str, Any]:
    numbers = [number for number, one in enumerate(layers) if one.attention and one.attention.window]
    found = {"tokens": near.window, "layers": numbers, "theta": near.rope.theta}
    if near.value_norm:  # Gemma 4, also where images are not seen in both directions
        found["images_whole" if near.images_whole else "images_here_alone"] = True
    return found


def _experts(layers: Sequence[Layer], usual: Layer) -> dict[str, Any] | None:
    if usual.experts is None:
        return None
    dense = [one for one in layers if not one.experts]
    said = {"dense_layers": len(dense), "dense_width": dense[0].ffn_hidden_size} if dense else {}
    return hashed(usual.experts) | said


def _linear(layers: Sequence[Layer]) -> dict[str, Any] | None:
    numbers = [number for number, one in enumerate(layers) if one.linear]
    return hashed(layers[numbers[0]].linear) | {"layers": numbers} if numbers else None


def _differ_otherwise(layers: Sequence[Layer], attentions: Sequence[Attention]) -> bool:
    """Whether these names do not tell all layers: some of one kind differ, or what is named once is not the same."""
    kinds = {
        (one.attention and one.attention.window is None, one.keys_from is None, one.experts is None) for one in layers
    }
    each = {repr(replace(one, keys_from=None)) for one in layers}
    shared = ({repr(_shared(one)) for one in parts} for parts in (layers, attentions))
    return len(each) > len(kinds) or any(len(parts) > 1 for parts in shared)
