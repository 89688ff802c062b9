"""Read the config.json of Qwen2-VL to Qwen3.5: a ViT at native resolution, M-RoPE in the language model.

From Qwen3-VL on the ViT has learned positions, and there are dense language models and mixtures of experts. Features
of Qwen3-VL's ViT enter its first language layers; most of Qwen3.5's language layers are linear attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section, part_type
from omnibal_ext.families.towers.llama import tied_as_either_says
from omnibal_ext.families.towers.native import ACTIVATIONS, native_sizes
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.noted import noted
from omnibal_ext.modalities.vision.architecture import NativeResolution, VisionArchitecture
from omnibal_ext.reading.checks import anything, finite, integer, listing, mapping, record, shown

NORM_EPSILON = 1e-6  # of every norm of the ViT, whatever the config says
LAYERS, RATIO = listing(integer(0, 2**10), most=2**10), finite(1e-3, 1e3)
ROPE = record({}, {"rope_theta": finite(1, 1e12)})
OUTER = (
    "model_type", "vision_config", "text_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "vision_token_id", "tie_word_embeddings", "architectures", "transformers_version",
)  # fmt: skip
"""Fields that are not the language model's, though published files have both on one level."""


@dataclass(frozen=True)
class Generation:
    """What the code of a model type does, whatever config.json says."""

    template: str
    """Chat template, if the folder has none."""
    read_language: Callable[[Section], LanguageArchitecture]
    markup: str = "qwen3-vl"
    learned: bool = True
    """Whether the ViT has learned positions in addition to RoPE (from Qwen3-VL on)."""
    windows: bool = False
    """Whether the ViT has window attention and gated MLPs, and a video's positions follow its seconds (Qwen2.5-VL)."""
    featured: bool = False
    """Whether features of ViT layers enter the language model (DeepStack)."""


def read_qwen(name: str, config: Section, code: Generation) -> Architecture:
    """Read a Qwen model's config.json as its generation's `code` does. Raises UserError naming a bad field."""
    kind = config["model_type"]
    tower = config.inner("vision_config", f"{kind}_vision", always=True)
    model = _language(config, f"{kind}_text", code.read_language)
    prompt = PromptFormat(code.markup, config.take("image_token_id"), code.template, "native")
    types, tied = (kind, f"{kind}_text"), tied_as_either_says(config)
    return with_tower(name, tower, model, code, prompt=prompt, types=types, tied=tied)


def with_tower(
    name: str, tower: Section, model: LanguageArchitecture, code: Generation, **of_whole: Any
) -> Architecture:
    """Return the model of a language model and the ViT of a section. Raises UserError naming an unsupported field."""
    tower.must(in_channels=3, in_chans=3)
    later = code.windows or code.learned
    if (out := tower.take("out_hidden_size" if later else "hidden_size")) != model.hidden_size:
        raise UserError(
            f"{tower.where}: its output is {out} wide, the language model's hidden_size is {model.hidden_size}"
        )
    sizes = native_sizes(tower, width="hidden_size" if later else "embed_dim")
    width, patch = sizes["hidden_size"], sizes["patch_size"]
    tower.must(spatial_patch_size=patch, spatial_merge_size=2)
    vision = VisionArchitecture(
        **sizes,
        ffn_hidden_size=tower.take("intermediate_size") if later else int(width * tower.take("mlp_ratio", RATIO)),
        normalization="RMSNorm" if code.windows else "LayerNorm",
        norm_epsilon=NORM_EPSILON,
        activation=tower.choose("hidden_act", ACTIVATIONS),
        gated=code.windows,
        patch_bias=code.learned,
        pixels="half" if code.learned else "clip",
        native=_native(tower, patch, code),
        feature_layers=tuple(tower.take("deepstack_visual_indexes", LAYERS)) if code.featured else (),
    )
    tower.refuse_unread()
    return Architecture(name, vision, model, shuffle=2, projector_norm=False, **of_whole)


def _language(config: Section, kind: str, read: Callable[[Section], LanguageArchitecture]) -> LanguageArchitecture:
    """Read the language model, from its section or, in older files, from the top level.

    Folders saved by transformers 4.52 to 4.55 have both. The section is what counts: raises UserError where the fields
    outside it say something else.
    """
    given = {name: value for name, value in config.values.items() if name not in OUTER}
    config.asked.update(given)
    inner = config.take_if("text_config", mapping(anything))
    if not inner:
        return read(config.section_of("text_config", kind, given))
    part_type(f"{config.where}.text_config", inner, kind)
    model = read(config.section_of("text_config", kind, inner))
    repeated = {name: value for name, value in given.items() if value is not None}
    faults: list[str] = []
    other = read(config.read_as(kind, {**inner, **repeated}, faults))
    config.faults.extend(faults if not config.faults else ())
    inside, outside = noted(model), noted(other)
    for name, value in inside.items():
        if value != (outer := outside.get(name)):
            raise UserError(
                f"{config.where}: {name} is {shown(value)} in text_config, which counts, and {shown(outer)} outside "
                "it: make them one"
            )
    return model


def _native(tower: Section, patch: int, code: Generation) -> NativeResolution:
    theta = (tower.take_if("rope_parameters", ROPE) or {}).get("rope_theta", 1e4)
    frames, merge = tower.take("temporal_patch_size"), 2
    if code.learned:
        positions = tower.take("num_position_embeddings")
        if isqrt(positions) ** 2 != positions:
            raise UserError(f"{tower.where}.num_position_embeddings is {positions}; supported: squares of a number")
        return NativeResolution(merge, frames, theta=theta, learned_positions=isqrt(positions))
    if not code.windows:
        return NativeResolution(merge, frames, theta=theta)
    in_time = tower.take_if("tokens_per_second", finite(0, 1e6))
    size = tower.take("window_size")
    side, rest = divmod(size, merge * patch)
    if rest:
        raise UserError(f"{tower.where}.window_size is {size}; supported: multiples of {merge * patch}")
    full = tuple(tower.take("fullatt_block_indexes", LAYERS))
    return NativeResolution(merge, frames, side, full, theta, positions_per_second=in_time)
