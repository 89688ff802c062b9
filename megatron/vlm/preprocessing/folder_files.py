"""Preprocessing settings in the files of a model's Hugging Face folder.

| file | what is read |
|---|---|
| preprocessor_config.json (or processor_config.json) | mean and deviation of pixels, tile size, fewest and most tiles |
| the same, or video_preprocessor_config.json | the video rule |
| config.json, if InternVL's own | fewest and most tiles, thumbnail, dynamic tiling or not |
| chat_template.jinja, .json, tokenizer_config.json | the chat template |
| tokenizer.json, tokenizer.model | the tokenizer |

An unsupported field that would change pixels is refused by name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.vlm.data.media.images import NORMALIZATIONS
from megatron.vlm.data.media.tiles import FRAMES, RULES
from megatron.vlm.data.media.video_rules import MOST_FRAMES_SEEN, VIDEO_RULES, VideoRule
from megatron.vlm.preprocessing.folder_template import folder_template
from megatron.vlm.preprocessing.tokenizer import model_tokenizer
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import CONFIG, read_config
from omnibal_ext.architectures.vision import VisionArchitecture
from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import shown, whole

LLAVA_SIDE = 224
"""LLaVA-1.5's processor: default side in pixels."""
ONE_SQUARE = ("pad", "fixed")
"""Tiling rules of LLaVA models of one square per image; the folder's processor may choose the other or `crop`."""
SPLIT_SIDE, TILE_SIDE, MOST_SIDE = 1456, 364, 4096
"""Idefics 3's processor: default longer side of an image and side of a tile, longest side, in pixels."""
PROCESSORS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class FlagValue:
    """A value and its origin: a file of the folder, a flag, the model, or a default."""

    value: Any
    origin: str


def folder_settings(folder: Path, architecture: Architecture, with_template: bool = True) -> dict[str, FlagValue]:
    """Preprocessing flag -> the value in the folder's files; the chat template only `with_template`.

    Raises UserError naming a file and field that is not supported.
    """
    name, processor = _processor(folder)
    found = _limits(architecture)(processor, folder / name, architecture)
    if rule := VIDEO_RULES.get(architecture.prompt.image_markup):
        found["video"] = video_rule(folder, rule, architecture.vision)
    found |= _original_tiles(read_config(folder / CONFIG))
    if processor:
        _check_pixels(processor, folder / name, architecture)
        scaled = RULES[architecture.prompt.tiling].scaled
        if scaled and ("image_mean" in processor or "image_std" in processor):
            found["normalize"] = FlagValue(_normalization(processor, folder / name), name)
        if architecture.prompt.tiling in ONE_SQUARE:
            found["tiling"] = FlagValue(_square(processor, folder / name, architecture.vision.image_size), name)
    if tokenizer := model_tokenizer(folder):
        found["tokenizer-model"] = FlagValue(tokenizer, tokenizer.name)
    if with_template and (template := folder_template(folder)):
        found["chat-template"] = FlagValue(*template)
    return found


def _processor(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """The image processor's file and fields; newer folders have them in processor_config.json."""
    for name in PROCESSORS:
        if (folder / name).is_file():
            config = read_config(folder / name)
            fields = config.get("image_processor", config if name == PROCESSORS[0] else {})
            if fields:
                return name, fields
    return PROCESSORS[0], {}


def _check_pixels(processor: Mapping[str, Any], where: Path, architecture: Architecture) -> None:
    """Refuse settings that would give other pixels: resampling, scaling, crops, tiles of another size."""
    vision = architecture.vision
    steps = dict.fromkeys(("do_resize", "do_rescale"), True) | {"do_pan_and_scan": False}
    steps["do_normalize"] = RULES[architecture.prompt.tiling].scaled
    for name, wanted in steps.items():
        if bool(processor.get(name, wanted)) != wanted:
            raise UserError(f"{where}: {name} is {processor[name]!r}; supported: {wanted!r}")
    resampling = int(RULES[architecture.prompt.tiling].resampling)
    if processor.get("resample") not in (None, resampling):
        raise UserError(f"{where}: resample is {processor['resample']!r}; supported: {resampling!r}")
    if abs((processor.get("rescale_factor") or 1 / 255) - 1 / 255) > 1e-6:
        raise UserError(f"{where}: rescale_factor is {processor['rescale_factor']}; supported: 1/255")
    size = vision.image_size
    by_tiles = RULES[architecture.prompt.tiling].by_tiles
    for name in ("max_image_size",) if by_tiles else ("crop_size", "size") if vision.native is None else ():
        sides = processor.get(name) or {}
        sides = {"side": sides} if isinstance(sides, int) else sides
        if unlike := [side for side in sides.values() if side not in (None, size)]:
            raise UserError(f"{where}: {name} is {unlike[0]}, the model of {CONFIG} sees tiles of {size} pixels a side")


def _square(processor: Mapping[str, Any], where: Path, side: int) -> str:
    """The tiling rule by which a LLaVA model's processor makes a square, with the processor's defaults.

    CLIP's (LLaVA-1.5) pads if `do_pad`, else crops; SigLIP's stretches. Raises UserError if it makes no square of the
    model's size.
    """
    size, stretches = processor.get("size"), str(processor.get("image_processor_type")).startswith("Siglip")
    named = isinstance(size, Mapping) and "height" in size
    cut, pad = bool(processor.get("do_center_crop", not stretches)), bool(processor.get("do_pad"))
    if stretches and (cut or pad or not (named or size is None)):
        raise UserError(f"{where}: SigLIP's images are stretched to a size of height and width; no other way is known")
    if not (stretches or cut or pad or named):
        raise UserError(f"{where}: do_center_crop is False; supported: True, without which images are no squares")
    for name in ("size", "crop_size") if cut else ("size",):
        if processor.get(name) is None and side != LLAVA_SIDE:
            raise UserError(
                f"{where}: {name} is missing, which means {LLAVA_SIDE} pixels; the model of {CONFIG} sees {side}"
            )
    return "pad" if pad else "fixed" if named or stretches else "crop"


def _normalization(processor: Mapping[str, Any], where: Path) -> str:
    given = (processor.get("image_mean"), processor.get("image_std"))
    for name, known in NORMALIZATIONS.items():
        if all(_same(values, wanted) for values, wanted in zip(given, known, strict=True)):
            return name
    raise UserError(f"{where}: image_mean {given[0]} and image_std {given[1]} are none of {', '.join(NORMALIZATIONS)}")


def _same(values: Any, wanted: tuple[float, ...]) -> bool:
    return (
        isinstance(values, list)
        and len(values) == 3
        and all(abs(a - b) < 1e-6 for a, b in zip(values, wanted, strict=True))
    )


def _limits(architecture: Architecture) -> Callable[[Mapping[str, Any], Path, Architecture], dict[str, FlagValue]]:
    """The reader of the limits of an image's size, by tiling rule."""
    rule = RULES[architecture.prompt.tiling]
    if rule.by_tiles:
        return _longest_sides
    if rule.by_rows:
        return _longest_edge
    if rule.native and rule.square == 1:
        return _soft_tokens
    return _patches if architecture.vision.native else _tiles


def _tiles(processor: Mapping[str, Any], where: Path, _: Architecture) -> dict[str, FlagValue]:
    """Limits of tiles, in transformers' InternVL processor."""
    flags = {"min_patches": "min-tiles", "max_patches": "max-tiles"}
    return {flag: FlagValue(processor[field], where.name) for field, flag in flags.items() if processor.get(field)}


def _patches(processor: Mapping[str, Any], where: Path, architecture: Architecture) -> dict[str, FlagValue]:
    """Limits of patches at native resolution, which the file has in pixels."""
    vision = architecture.vision
    assert vision.native is not None
    wanted = {"patch_size": vision.patch_size, "temporal_patch_size": vision.native.frames}
    for name, value in (wanted | dict.fromkeys(("merge_size", "pooling_kernel_size"), vision.native.merge)).items():
        if processor.get(name) not in (None, value):
            raise UserError(f"{where}: {name} is {processor[name]}, the model of {CONFIG} has {value}")
    if tokens := processor.get("max_soft_tokens"):
        return {
            "max-tiles": FlagValue(
                whole(1, 2**20)(f"{where}: max_soft_tokens", tokens) * vision.native.merge**2, where.name
            )
        }
    sides, found, pair = processor.get("size") or {}, {}, vision.patch_size**2
    if architecture.prompt.tiling == "native_grown":  # whose processors count each pixel once per equal frame
        pair *= vision.native.frames
    for flag, names in (("min-tiles", ("min_pixels", "shortest_edge")), ("max-tiles", ("max_pixels", "longest_edge"))):
        pixels = processor.get(names[0]) or sides.get(names[0]) or sides.get(names[1])
        if pixels is None:
            continue
        if pixels % pair:
            raise UserError(f"{where}: {names[0]} is {pixels}; supported: multiples of {pair}, a patch's")
        found[flag] = FlagValue(pixels // pair, where.name)
    return found


def _soft_tokens(processor: Mapping[str, Any], where: Path, architecture: Architecture) -> dict[str, FlagValue]:
    """Limits of patches where ours is a square of the file's patches (Gemma 4 without a vision tower)."""
    usual = {"patch_size": 16, "pooling_kernel_size": 3}
    patch, square = (whole(1, 2**14)(f"{where}: {name}", processor.get(name) or usual[name]) for name in usual)
    if processor and patch * square != architecture.vision.patch_size:
        raise UserError(
            f"{where}: patches of {patch} pixels, {square} a side, the model of {CONFIG} has "
            f"{architecture.vision.patch_size} pixels"
        )
    tokens = processor.get("max_soft_tokens")
    return {"max-tiles": FlagValue(whole(1, 2**20)(f"{where}: max_soft_tokens", tokens), where.name)} if tokens else {}


def _longest_edge(processor: Mapping[str, Any], where: Path, architecture: Architecture) -> dict[str, FlagValue]:
    """Limits of patches where the file limits an image's longer side (Pixtral)."""
    vision = architecture.vision
    assert vision.native is not None
    square, own = vision.patch_size * vision.native.merge, where.parent / PROCESSORS[1]
    fields = read_config(own) if own.is_file() else {}
    patch, merge = (fields.get(name) or usual for name, usual in (("patch_size", 16), ("spatial_merge_size", 1)))
    if processor and patch * merge != square:
        raise UserError(f"{own}: patches of {patch} pixels, {merge} a side, the model of {CONFIG} has {square} pixels")
    edge = (processor.get("size") or {}).get("longest_edge")
    if edge is None:
        return {}
    if edge % square:
        raise UserError(f"{where}: longest_edge is {edge}; supported: multiples of {square}, a square's")
    return {"max-tiles": FlagValue((edge // vision.patch_size) ** 2, where.name)}


def _longest_sides(processor: Mapping[str, Any], where: Path, architecture: Architecture) -> dict[str, FlagValue]:
    """Limits of tiles where the file sets an image's longer side (Idefics 3)."""
    side = architecture.vision.image_size
    if not processor.get("do_image_splitting", True):
        raise UserError(
            f"{where}: do_image_splitting is False; supported: True. --max-tiles 1 makes one tile of an image"
        )
    if not processor:
        return {}
    edge = (processor.get("size") or {}).get("longest_edge", SPLIT_SIDE)
    if (processor.get("max_image_size") or {}).get("longest_edge", TILE_SIDE) != side:
        raise UserError(f"{where}: max_image_size is not {side}, the side of a tile of the model of {CONFIG}")
    if not side <= edge <= MOST_SIDE or edge % side:
        raise UserError(f"{where}: longest_edge is {edge}; supported: multiples of {side}, a tile's, up to {MOST_SIDE}")
    return {"max-tiles": FlagValue((edge // side) ** 2, where.name)}


def video_rule(folder: Path, rule: VideoRule, vision: VisionArchitecture) -> FlagValue:
    """The video rule of the folder's processor, from the file that transformers reads.

    An unsupported setting sets `refused`, as the folder may still be used for images.
    """
    name, fields = _video_processor(folder)
    size, limits = _section(fields, "size"), {}
    for limit, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        found = size.get(edge)
        if not rule.whole:  # whose processor prefers min_pixels and max_pixels
            found = fields.get(limit) or found
        limits[limit] = found or getattr(rule, limit)
    names = {"max_seconds": "max_duration"}
    own = {field: value for field in rule.obeys if (value := fields.get(names.get(field, field))) is not None}
    capped, tokens = fields.get("cap_pixels_per_frame"), fields.get("max_video_tokens")
    found = replace(rule, **limits, **own, capped=bool(capped), max_tokens=tokens or rule.max_tokens)
    if refused := _not_honoured(fields, found, folder / name, vision):
        return FlagValue(replace(rule, refused=refused), name)
    return FlagValue(found, name)


def _video_processor(folder: Path) -> tuple[str, Mapping[str, Any]]:
    for name in ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            config = read_config(folder / name)
            fields = _section(config, "video_processor") if name == "processor_config.json" else config
            if fields:
                return name, fields
    return CONFIG, {}


def _section(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    inner = fields.get(name)
    return inner if isinstance(inner, Mapping) else {}


def _not_honoured(fields: Mapping[str, Any], rule: VideoRule, where: Path, vision: VisionArchitecture) -> str:
    """An error for the first field that asks for other frames or pixels than ours; "" if there is none."""
    assert vision.native is not None
    mean, deviation = NORMALIZATIONS[vision.pixels]
    wanted = {
        "do_resize": True, "do_rescale": True, "do_normalize": True,
        "resample": int(RULES["native"].resampling),
        "patch_size": vision.patch_size, "merge_size": vision.native.merge, "temporal_patch_size": vision.native.frames,
        "image_mean": list(mean), "image_std": list(deviation),
    }  # fmt: skip
    if "max_frames" in rule.obeys:  # others ignore it
        wanted["num_frames"] = None
    for name, value in wanted.items():
        if fields.get(name) not in (None, value):
            return f"{where}: {name} is {fields[name]!r}; supported for videos: {value!r}"
    numbers = (rule.fps, rule.min_frames, rule.max_frames, rule.min_pixels, rule.max_pixels, rule.max_tokens)
    is_sound = all(isinstance(number, int | float) and number > 0 for number in numbers)
    if not is_sound or not FRAMES <= rule.min_frames <= rule.max_frames <= MOST_FRAMES_SEEN:
        return f"{where}: no rule for videos: fps, frames, pixels and tokens are {shown(numbers)}"
    return ""


def _original_tiles(config: Mapping[str, Any]) -> dict[str, FlagValue]:
    """Limits of tiles, in InternVL's own config.json."""
    flags = {"min_dynamic_patch": "min-tiles", "max_dynamic_patch": "max-tiles", "use_thumbnail": "thumbnail"}
    found = {flag: FlagValue(config[field], CONFIG) for field, flag in flags.items() if config.get(field) is not None}
    if config.get("dynamic_image_size") is False:
        found["tiling"] = FlagValue("fixed", CONFIG)
    return found
