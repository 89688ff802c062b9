"""Read the config.json of Gemma 4: images at their own size, local layers and global ones with heads of their own.

Of the global layers' heads transformers writes the width and number by layer (`per_layer_config`), published files once
for all of them (`global_head_dim`, `num_global_key_value_heads`).
"""

from dataclasses import replace
from typing import Any

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.errors import UserError
from omnibal_ext.families.fields import BASE, FACTOR, HEADS, WIDTH
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import (
    FULL,
    SLIDING,
    check_groups,
    chosen_experts,
    grouped_sizes,
    kinds_of_layers,
    tied,
)
from omnibal_ext.families.towers.native import native_sizes
from omnibal_ext.modalities.language.architecture import LanguageArchitecture, Older
from omnibal_ext.modalities.language.experts import Experts
from omnibal_ext.modalities.language.layer import Attention, Layer, LayerInputs
from omnibal_ext.modalities.language.rope import Rope, RopeScaling
from omnibal_ext.modalities.vision.architecture import NativeResolution, VisionArchitecture
from omnibal_ext.reading.checks import finite, integer, mapping, maybe, record, shown, text

PATTERN = 6
"""Distance of global layers if config.json does not list them; the last layer always is one."""
ROPE = record(
    {},
    {"rope_type": maybe(text), "rope_theta": maybe(BASE), "factor": maybe(FACTOR)}
    | {"partial_rotary_factor": maybe(finite(0, 1))},
)
ROPES = record({}, {SLIDING: ROPE, FULL: ROPE})
OWN = mapping(record({}, {"head_dim": WIDTH, "num_key_value_heads": HEADS}))
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh"}
DIRECTIONS = ("vision", None)


def read_gemma4(name: str, config: Section) -> Architecture:
    """Read a gemma4's config.json. Raises UserError naming an unsupported field."""
    if not config.get("vision_config"):
        raise UserError(f"{config.where}.vision_config is missing; only models with a vision tower are supported")
    tower, language = config.towers("gemma4_vision", "gemma4_text")
    return Architecture(
        name,
        _vision(tower),
        read_language(language),
        shuffle=tower.take("pooling_kernel_size"),
        pools=True,
        projector_norm=False,
        tied=tied(config),
        prompt=PromptFormat("gemma4", config.take("image_token_id"), "gemma4", "gemma4"),
        types=("gemma4", "gemma4_text"),
    )


def _vision(tower: Section) -> VisionArchitecture:
    tower.must(attention_bias=False, attention_dropout=0.0)
    sizes = native_sizes(tower, "num_hidden_layers", heads="num_attention_heads")
    tower.must(num_key_value_heads=sizes["heads"], head_dim=sizes["hidden_size"] // sizes["heads"])
    rope = tower.take_if("rope_parameters", ROPE) or {}
    if rope.get("rope_type") not in (None, "axial", "default"):  # which older files say, and mean the same
        raise UserError(f"{tower.where}.rope_parameters: rope type {shown(rope['rope_type'])}; supported: 'axial'")
    vision = VisionArchitecture(
        **sizes,
        ffn_hidden_size=tower.take("intermediate_size"),
        normalization="RMSNorm",
        norm_epsilon=tower.take("rms_norm_eps"),
        qkv_bias=False,
        head_norms=True,
        branch_norms=True,
        activation=tower.choose("hidden_activation", ACTIVATIONS),
        gated=True,
        bias=False,
        patch_bias=False,
        clipped=tower.take("use_clipped_linears"),
        standardized=tower.take("standardize"),
        pixels="half",
        native=NativeResolution(
            merge=tower.take("pooling_kernel_size"),
            frames=1,
            theta=float(rope.get("rope_theta") or 100.0),
            axis_positions=tower.take("position_embedding_size"),
            by_halves=True,
        ),
    )
    tower.refuse_unread()
    return vision


def read_language(section: Section, images_whole: bool = False) -> LanguageArchitecture:
    """Read Gemma 4's language model. Raises UserError naming an unsupported field.

    Tokens of an image see each other in both directions in layers with a window; if `images_whole` in all, however far.
    """
    section.must(attention_bias=False, attention_dropout=0.0)
    both_ways = section.take_if("use_bidirectional_attention", text)
    if both_ways not in DIRECTIONS:
        raise UserError(f"{section.where}.use_bidirectional_attention is {shown(both_ways)}; supported: 'vision', null")
    experts = _experts(section)
    sizes = grouped_sizes(section, mixture=experts is not None)
    kinds = _kinds(section, sizes.layers)
    near = sizes.attention(
        qk_norm=True, value_norm=True, query_scale=1, sees_images=both_ways == "vision", images_whole=images_whole
    )
    far = _with_far_heads(section, near, [number for number, kind in enumerate(kinds) if kind == FULL])
    check_groups(section, far.heads, far.kv_heads, far.head_dim)
    far_rope, near_rope = _rotation(section)
    mixers = {
        SLIDING: replace(near, rope=near_rope, window=section.take("sliding_window")),
        FULL: replace(far, rope=far_rope, sees_images=near.sees_images and images_whole),
    }
    layer = Layer(
        near, sizes.ffn_hidden_size, experts, section.choose("hidden_activation", ACTIVATIONS), branch_norms=True,
        layer_scalar=True, layer_inputs=_layer_inputs(section, sizes.vocab_size),
    )  # fmt: skip
    layers = _layers(section, layer, mixers, kinds)
    cap = section.take_if("final_logit_softcapping")
    section.refuse_unread()
    return sizes.model(layers, scaled_words=True, logit_cap=cap, older=Older(head_said=True))


def _layer_inputs(section: Section, words: int) -> LayerInputs | None:
    """Return what every layer gets besides the hidden states (`LayerInputs`); None if its width is 0."""
    names = ("vocab_size_per_layer_input", "pad_token_id")
    if not (width := section.take_if("hidden_size_per_layer_input", integer(0, 2**16))):
        section.asked.update(names)  # without effect then
        return None
    own, blank = section.take(names[0]), section.take_if(names[1])
    if own < words or blank is None or blank >= own:
        raise UserError(
            f"{section.where}: {names[0]} is {own} and {names[1]} {shown(blank)}; supported: all {words} words of "
            "vocab_size, and one of them"
        )
    return LayerInputs(width, own, blank)


def _layers(section: Section, usual: Layer, mixers: dict[str, Attention], kinds: list[str]) -> list[Layer]:
    """Return the layers; `kinds`: with a window or not, `mixers`: the attention of either kind. The last ones may take
    keys and values from an earlier layer: the last of their own kind that has some. Raises UserError if there is
    none."""
    widens = section.take_if("use_double_wide_mlp") or False
    taking = section.take_if("num_kv_shared_layers", integer(0, 2**16)) or 0
    own = kinds[: max(0, len(kinds) - taking)]
    last = {kind: number for number, kind in enumerate(own)}
    if len(last) < len(mixers):
        raise UserError(
            f"{section.where}.num_kv_shared_layers is {taking} of {len(kinds)}; supported: numbers that leave "
            "a layer of each of layer_types before them"
        )
    wide = replace(usual, ffn_hidden_size=usual.ffn_hidden_size * (1 + widens))
    others = (
        replace(wide, mixer=replace(mixers[kind], reads_keys=True), keys_from=last[kind]) for kind in kinds[len(own) :]
    )
    return [*(replace(usual, mixer=mixers[kind]) for kind in own), *others]


def _experts(section: Section) -> Experts | None:
    """Read experts that every layer has next to an MLP; None: config.json turns them off."""
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not section.take_if("enable_moe_block"):
        section.asked.update(names)  # without effect then
        return None
    count = section.take(names[0])
    return Experts(
        count, chosen_experts(section, count, names[1]), balance=0.0, beside=section.take("intermediate_size")
    )


def _kinds(section: Section, layers: int) -> list[str]:
    """Return for each layer if it has a sliding window; the last one never has, whatever config.json says."""
    kinds = kinds_of_layers(section, layers, PATTERN)
    if SLIDING not in kinds[:-1]:
        raise UserError(f"{section.where}.layer_types has no {SLIDING!r} before the last layer; at least one is needed")
    return [*kinds[:-1], FULL]


def _with_far_heads(section: Section, near: Attention, far: list[int]) -> Attention:
    """Return attention like `near` with the heads of the global layers, whose numbers are `far`. Raises UserError if
    these differ from each other, or other layers have heads of their own."""
    alike = section.take("attention_k_eq_v")
    width = section.take_if("global_head_dim") or 512
    groups = section.take_if("num_global_key_value_heads")
    by_layer = section.take_if("per_layer_config", OWN)
    if by_layer is None:
        heads = groups if alike and groups else near.kv_heads
        return replace(near, kv_heads=heads, head_dim=width, keys_are_values=alike)
    named = {name.lstrip("0") or "0": fields for name, fields in by_layer.items()}  # "05" of sixty
    own = [named.get(str(number), {}) for number in far]
    if set(named) - {str(number) for number in far} or any(one != own[0] for one in own):
        raise UserError(
            f"{section.where}.per_layer_config: supported: the same in all layers of {FULL!r}, and in no other"
        )
    groups, width = own[0].get("num_key_value_heads", near.kv_heads), own[0].get("head_dim", near.head_dim)
    return replace(near, kv_heads=groups, head_dim=width, keys_are_values=alike)


def _rotation(section: Section) -> tuple[Rope, Rope]:
    """Return RoPE of global layers, and of layers with a window. Raises UserError naming an unsupported field."""
    given: dict[str, Any] = section.take_if("rope_parameters", ROPES) or {}
    usual: dict[str, Any] = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    near, far = (given.get(SLIDING), given.get(FULL)) if given else ({"rope_theta": 1e4}, usual)
    if not near or not far or not near.get("rope_theta") or not far.get("rope_theta"):
        raise UserError(f"{section.where}.rope_parameters: rope_theta is needed for {SLIDING!r} and {FULL!r}")
    unread = {name for name, value in given.items() if value and name not in (SLIDING, FULL, "rope_type")}
    unread |= {
        name for rope in (near, far) for name in rope if name not in ("rope_type", "rope_theta", *usual, "factor")
    }
    if unread:
        raise UserError(f"{section.where}.rope_parameters has {shown(min(unread))}, which is not known here")
    for layers, rope, known in ((SLIDING, near, ("default",)), (FULL, far, ("default", "proportional"))):
        if (kind := rope.get("rope_type") or "default") not in known:
            raise UserError(f"{section.where}: {layers} has rope type {kind!r}; supported: {', '.join(known)}")
    scaling = None
    if far.get("rope_type") == "proportional":
        share = far.get("partial_rotary_factor")
        scaling = RopeScaling("proportional", float(far.get("factor") or 1), turning=1.0 if share is None else share)
    return Rope(float(far["rope_theta"]), scaling), Rope(float(near["rope_theta"]))
