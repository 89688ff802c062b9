"""Read the config.json of Gemma 3 (arXiv 2503.19786): SigLIP, local and global language layers.

In five of six layers a token looks back over a window; rotation differs between the two kinds.
"""

from dataclasses import replace
from math import isqrt
from typing import Any

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import FULL, SLIDING, grouped_sizes, kinds_of_layers, tied
from omnibal_ext.families.towers.rotation import ROPE, read_rope
from omnibal_ext.families.towers.tiles import siglip
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.layer import Layer
from omnibal_ext.modalities.language.rope import Rope
from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.reading.checks import flag, integer, record, shown

ROPES = record({}, {SLIDING: ROPE, FULL: ROPE})
ROPE_KINDS = ("default", "linear")


def read_gemma3(name: str, config: Section) -> Architecture:
    """Read a gemma3's config.json. Raises UserError naming an unsupported field."""
    tower, language = config.towers("siglip_vision_model", "gemma3_text")
    vision = siglip(tower, tower.take("num_hidden_layers"), final_norm=True)
    return Architecture(
        name,
        vision,
        _language(language),
        shuffle=_square(config, vision),
        pools=True,
        tied=tied(config),
        prompt=PromptFormat("gemma", config.take("image_token_index"), "gemma", "gemma"),
        types=("gemma3", "gemma3_text"),
    )


def _square(config: Section, vision: VisionArchitecture) -> int:
    """Return the side, in patches, of the squares whose features are averaged to one token each."""
    tokens, side = config.take("mm_tokens_per_image", integer(1, 2**20)), vision.image_size // vision.patch_size
    root = isqrt(tokens)
    if root**2 != tokens or side % root:
        raise UserError(
            f"{config.where}.mm_tokens_per_image is {tokens}; supported: squares of a number that divides the "
            f"{side} patches a side"
        )
    return side // root


def _language(section: Section) -> LanguageArchitecture:
    section.must(attention_bias=False, attention_dropout=0.0, attn_logit_softcapping=None, final_logit_softcapping=None)
    if section.take_if("use_bidirectional_attention", flag):
        raise UserError(f"{section.where}.use_bidirectional_attention is True; supported: False")
    sizes = grouped_sizes(section)
    scale = section.take("query_pre_attn_scalar")
    rope, near_rope = _rotation(section)
    kinds = kinds_of_layers(section, sizes.layers, section.take_if("sliding_window_pattern") or 6)
    far = sizes.attention(
        rope=rope, qk_norm=True, query_scale=None if scale == sizes.head_dim else scale, sees_images=True
    )
    activation = section.choose("hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh"})
    window = section.take("sliding_window") if SLIDING in kinds else None
    mixers = {FULL: far, SLIDING: replace(far, rope=near_rope, window=window)}
    layers = [Layer(mixers[kind], sizes.ffn_hidden_size, activation=activation, branch_norms=True) for kind in kinds]
    section.refuse_unread()
    return sizes.model(layers, centred_norms=True, scaled_words=True, older=replace(sizes.older, far_rope=rope))


def _rotation(section: Section) -> tuple[Rope, Rope]:
    """Return RoPE of global layers, and of layers with a window; config.json has two ways to say it."""
    both: dict[str, Any] = section.take_if("rope_parameters", ROPES) or {}
    if unknown := set(both) - {SLIDING, FULL}:
        raise UserError(f"{section.where}.rope_parameters has {shown(min(unknown))}; supported: {SLIDING!r}, {FULL!r}")
    near = both.get(SLIDING) or {}
    far = (both.get(FULL) or {}) | (section.take_if("rope_scaling", ROPE) or {})
    far_base, near_base = section.take_if("rope_theta"), section.take_if("rope_local_base_freq")
    theta, near_theta = far.get("rope_theta") or far_base or 1e6, near.get("rope_theta") or near_base or 1e4
    for layers, rope, known in ((SLIDING, near, ROPE_KINDS[:1]), (FULL, far, ROPE_KINDS)):
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in known:
            raise UserError(f"{section.where}: {layers} has rope type {kind!r}; supported: {', '.join(known)}")
    read_rope(section, near)
    return Rope(float(theta), read_rope(section, far)), Rope(float(near_theta))
