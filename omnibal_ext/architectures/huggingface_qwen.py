"""Reads the config.json of Qwen2-VL to Qwen3.5: a ViT at native resolution, M-RoPE in the language model.

From Qwen3-VL on the ViT has learned positions, and there are dense language models and mixtures of experts. Features
of Qwen3-VL's ViT enter its first language layers; most of Qwen3.5's language layers are linear attention.
"""

from dataclasses import fields
from math import isqrt

from omnibal_ext.architectures.architecture import (
    Architecture,
    LanguageArchitecture,
    NativeResolution,
    PromptFormat,
    VisionArchitecture,
)
from omnibal_ext.architectures.huggingface_language import QWEN3_5_TEXTS, read_language
from omnibal_ext.architectures.huggingface_qwen3_5 import read_linear_language
from omnibal_ext.architectures.huggingface_section import Section, section
from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import anything, finite, listing, mapping, record, shown, whole

ACTIVATIONS = {one: one for one in ("silu", "quick_gelu", "gelu")} | {"gelu_pytorch_tanh": "gelu_tanh"}
FEATURED = ("qwen3_vl", "qwen3_vl_moe")
"""Whose ViT's layers give features that enter the language model later."""
LATEST = (*FEATURED, "qwen3_5", "qwen3_5_moe")
NORM_EPSILON = 1e-6  # of every norm of the ViT, whatever the config says
SIZE, LAYERS, RATIO = whole(1, 2**20), listing(whole(0, 2**10), most=2**10), finite(1e-3, 1e3)
ROPE = record({}, {"rope_theta": finite(1, 1e12)})
OUTER = (
    "model_type", "vision_config", "text_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "vision_token_id", "tie_word_embeddings", "architectures", "transformers_version",
)  # fmt: skip
"""Fields beside those of the language model, which published files have on the same level."""


def qwen_vl(name: str, config: Section, tied: bool) -> Architecture:
    """The model of a qwen2_vl's, qwen2_5_vl's, qwen3_vl's, qwen3_5's config.json, or of one with experts.

    Raises UserError naming a field that cannot be honoured.
    """
    kind = config["model_type"]
    tower = config.inner("vision_config", f"{kind}_vision", always=True)
    model = _language(config, f"{kind}_text")
    tower.must(in_channels=3, in_chans=3)
    later, latest = kind != "qwen2_vl", kind in LATEST
    width = tower.take("hidden_size" if later else "embed_dim", SIZE)
    if (out := tower.take("out_hidden_size" if later else "hidden_size", SIZE)) != model.hidden_size:
        raise UserError(f"{tower.where}: gives features of width {out}, the language model has {model.hidden_size}")
    patch, heads = tower.take("patch_size", SIZE), tower.take("num_heads", SIZE)
    if width % (4 * heads):
        raise UserError(f"{tower.where}: {width} does not divide into {heads} heads whose width is a multiple of 4")
    tower.must(spatial_patch_size=patch, spatial_merge_size=2)
    vision = VisionArchitecture(
        layers=tower.take("depth", whole(1, 2**10)),
        hidden_size=width,
        heads=heads,
        ffn_hidden_size=tower.take("intermediate_size", SIZE) if later else int(width * tower.take("mlp_ratio", RATIO)),
        patch_size=patch,
        image_size=patch,
        normalization="RMSNorm" if kind == "qwen2_5_vl" else "LayerNorm",
        norm_epsilon=NORM_EPSILON,
        activation=tower.choose("hidden_act", ACTIVATIONS),
        gated=kind == "qwen2_5_vl",
        patch_bias=latest,
        layer_scale=False,
        pixels="half" if latest else "clip",
        native=_native(tower, patch, kind),
        feature_layers=tuple(tower.take("deepstack_visual_indexes", LAYERS)) if kind in FEATURED else (),
    )
    tower.refuse_unread()
    templates = {"qwen2_vl": "qwen-vl", "qwen2_5_vl": "qwen2.5-vl"} | dict.fromkeys(FEATURED, "qwen3-vl")
    template = templates.get(kind, "qwen3.5")  # where the folder does not say it
    markup = "qwen3-vl" if latest else "qwen-vl"
    prompt = PromptFormat(markup, config.take("image_token_id", whole(0, 2**24)), template, "native")
    return Architecture(name, vision, model, shuffle=2, projector_norm=False, tied=tied, prompt=prompt)


def _language(config: Section, kind: str) -> LanguageArchitecture:
    """The language model, from a section of its own or from between the other fields.

    Folders saved by transformers 4.52 to 4.55 have both. The section is what counts: raises UserError where the fields
    beside it say something else.
    """
    read = read_linear_language if kind in QWEN3_5_TEXTS else read_language
    beside = {name: value for name, value in config.values.items() if name not in OUTER}
    config.asked.update(beside)
    inner = config.take_if("text_config", mapping(anything))
    if not inner:
        return read(config.section_of("text_config", kind, beside))
    model = read(config.section_of("text_config", kind, inner))
    repeated = {name: value for name, value in beside.items() if value is not None}
    faults: list[str] = []
    other = read(section(config.where, kind, {**inner, **repeated}, faults))
    config.faults.extend(faults if not config.faults else ())
    for name in (field.name for field in fields(model)):
        if (value := getattr(model, name)) != (besides := getattr(other, name)):
            raise UserError(
                f"{config.where}: {name} is {shown(value)} in text_config, which counts, and {shown(besides)} beside "
                "it: make them one"
            )
    return model


def _native(tower: Section, patch: int, kind: str) -> NativeResolution:
    theta = (tower.take_if("rope_parameters", ROPE) or {}).get("rope_theta", 1e4)
    frames, merge = tower.take("temporal_patch_size", SIZE), 2
    if kind == "qwen2_vl":
        return NativeResolution(merge, frames, theta=theta)
    if kind in LATEST:
        positions = tower.take("num_position_embeddings", SIZE)
        if isqrt(positions) ** 2 != positions:
            raise UserError(f"{tower.where}.num_position_embeddings is {positions}; supported: squares of a number")
        return NativeResolution(merge, frames, theta=theta, learned_positions=isqrt(positions))
    in_time = tower.take("tokens_per_second", finite(0, 1e6))
    size = tower.take("window_size", SIZE)
    side, rest = divmod(size, merge * patch)
    if rest:
        raise UserError(f"{tower.where}.window_size is {size}; supported: multiples of {merge * patch}")
    full = tuple(tower.take("fullatt_block_indexes", LAYERS))
    return NativeResolution(merge, frames, side, full, theta, positions_per_second=in_time)
