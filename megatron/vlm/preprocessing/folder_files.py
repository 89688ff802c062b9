"""Preprocessing settings in the files of a model's Hugging Face folder.

| file | what is read |
|---|---|
| processor_config.json, or preprocessor_config.json | mean and deviation of pixels, tile size, fewest and most tiles |
| the same, or video_preprocessor_config.json | the video rule |
| preprocessor_config.json, processor_config.json | how sounds are heard |
| config.json, if InternVL's own | fewest and most tiles, thumbnail, dynamic tiling or not |
| processor_config.json, chat_template.json, .jinja, tokenizer_config.json | the chat template |
| tokenizer.json, tokenizer.model | the tokenizer |

An unsupported field that would change pixels is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.vlm.preprocessing.folder_template import folder_template
from megatron.vlm.preprocessing.measures.registry import RULES
from megatron.vlm.preprocessing.tokenizer import model_tokenizer
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import CONFIG, OLD_PROCESSOR, PROCESSOR
from omnibal_ext.errors import UserError
from omnibal_ext.families.media import TILINGS, VIDEO_RULES
from omnibal_ext.families.processor_fields import read_fields, section
from omnibal_ext.families.registry import MARKUPS
from omnibal_ext.families.towers.video_rules import MOST_FRAMES_SEEN, VideoRule
from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.modalities.vision.normalization import NORMALIZATIONS
from omnibal_ext.modalities.vision.tiling import BICUBIC, FRAMES, Processor, TilingRule
from omnibal_ext.reading.checks import is_number, shown
from omnibal_ext.reading.fields import Fields


@dataclass(frozen=True, slots=True)
class FlagValue:
    """A value and its origin: a file of the folder, a flag, the model, or a default."""

    value: Any
    origin: str


def folder_settings(folder: Path, architecture: Architecture, with_template: bool = True) -> dict[str, FlagValue]:
    """Return the value of each preprocessing flag in the folder's files; the chat template only `with_template`.

    Raises UserError naming a file and field that is not supported.
    """
    processor, tiling = _processor(folder, architecture), TILINGS[architecture.prompt.tiling]
    name, config = processor.where.name, read_fields(folder / CONFIG)
    found = {flag: FlagValue(value, name) for flag, value in tiling.limits(processor).items()}
    if video := VIDEO_RULES.get(architecture.prompt.image_markup):
        found["video"] = video_rule(folder, video, architecture.vision)
    for one in architecture.further:
        reads = RULES[one.modality]
        found[one.modality.name] = FlagValue(*reads.in_folder(folder, reads.of_model(architecture)))
    found |= {flag: FlagValue(value, CONFIG) for flag, value in tiling.own_flags(config).items()}
    if processor.fields:
        _check_pixels(processor, tiling)
        if tiling.normalizes and ("image_mean" in processor.fields or "image_std" in processor.fields):
            found["normalize"] = FlagValue(_normalization(processor), name)
    if tokenizer := model_tokenizer(folder):
        found["tokenizer-model"] = FlagValue(tokenizer, tokenizer.name)
    if with_template and (template := folder_template(folder, MARKUPS[architecture.prompt.image_markup])):
        found["chat-template"] = FlagValue(*template)
    return found


def _processor(folder: Path, architecture: Architecture) -> Processor:
    """Return the image processor in processor_config.json, where transformers looks first, or in an older file."""
    for name in (PROCESSOR, OLD_PROCESSOR):
        fields = read_fields(folder / name)
        if "image_processor" in fields or name == PROCESSOR:
            fields = section(fields, "image_processor")
        if fields:
            break
    return Processor(folder / name, fields, architecture)


def _check_pixels(processor: Processor, rule: TilingRule) -> None:
    """Raise UserError for settings that would give other pixels: resampling, scaling, crops, tiles of another size."""
    steps = dict.fromkeys(("do_resize", "do_rescale"), True) | {"do_pan_and_scan": False}
    fields, size, resampling = processor.fields, processor.model.vision.image_size, int(rule.resampling)
    for name, wanted in (steps | {"do_normalize": rule.normalizes}).items():
        if bool(fields.get(name, wanted)) != wanted:
            raise processor.fault(f"{name} is {shown(fields[name])}; supported: {wanted!r}")
    if fields.get("resample") not in (None, resampling):
        raise processor.fault(f"resample is {shown(fields['resample'])}; supported: {resampling!r}")
    if abs((fields.get("rescale_factor") or 1 / 255) - 1 / 255) > 1e-6:
        raise processor.fault(f"rescale_factor is {fields['rescale_factor']}; supported: 1/255")
    for name in rule.side_fields:
        sides = fields.get(name) or {}
        sides = {"side": sides} if isinstance(sides, int) else sides
        if unlike := [side for side in sides.values() if side not in (None, size)]:
            raise processor.fault(f"{name} is {unlike[0]}, the model of {CONFIG} sees tiles of {size} pixels a side")


def _normalization(processor: Processor) -> str:
    given = (processor.fields.get("image_mean"), processor.fields.get("image_std"))
    for name, known in NORMALIZATIONS.items():
        if all(_same(values, wanted) for values, wanted in zip(given, known, strict=True)):
            return name
    raise processor.fault(
        f"image_mean {shown(given[0])} and image_std {shown(given[1])} are none of {', '.join(NORMALIZATIONS)}"
    )


def _same(values: Any, wanted: tuple[float, ...]) -> bool:
    return (
        isinstance(values, list)
        and len(values) == 3
        and all(is_number(a) and abs(a - b) < 1e-6 for a, b in zip(values, wanted, strict=True))
    )


def video_rule(folder: Path, rule: VideoRule, vision: VisionArchitecture) -> FlagValue:
    """Return the video rule of the folder's processor, from the file that transformers reads.

    An unsupported setting sets `refused`, as the folder may still be used for images.
    """
    name, fields = _video_processor(folder)
    try:
        return FlagValue(_video_rule(folder / name, fields, rule, vision), name)
    except UserError as error:
        return FlagValue(replace(rule, refused=str(error)), name)


def _video_rule(where: Path, fields: Fields, rule: VideoRule, vision: VisionArchitecture) -> VideoRule:
    size, limits = fields.get("size") or {}, {}
    edges = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    for limit, edge in () if rule.has_own_sizes else edges:
        found = size.get(edge) if isinstance(size, Mapping) else None
        if not rule.whole:  # whose processor prefers min_pixels and max_pixels
            found = fields.get(limit) or found
        limits[limit] = found or getattr(rule, limit)
    names = {"max_seconds": "max_duration"}
    own = {field: value for field in rule.obeys if (value := fields.get(names.get(field, field))) is not None}
    capped, tokens = fields.get("cap_pixels_per_frame"), fields.get("max_video_tokens")
    found = replace(rule, **limits, **own, capped=bool(capped), max_tokens=tokens or rule.max_tokens)
    _check_honoured(fields, found, where, vision)
    return found


def _video_processor(folder: Path) -> tuple[str, Fields]:
    if fields := section(read_fields(folder / PROCESSOR), "video_processor"):
        return PROCESSOR, fields
    for name in ("video_preprocessor_config.json", OLD_PROCESSOR):
        if fields := read_fields(folder / name):
            return name, fields
    return CONFIG, fields


def _check_honoured(fields: Fields, rule: VideoRule, where: Path, vision: VisionArchitecture) -> None:
    """Raise UserError for the first field that asks for other frames or pixels than ours."""
    assert vision.native is not None
    mean, deviation = NORMALIZATIONS[vision.pixels]
    wanted = {
        "do_resize": True, "do_rescale": True, "do_normalize": True,
        "resample": int(BICUBIC),
        "patch_size": vision.patch_size, "merge_size": vision.native.merge, "temporal_patch_size": vision.native.frames,
        "image_mean": list(mean), "image_std": list(deviation),
    }  # fmt: skip
    if "max_frames" in rule.obeys:  # others ignore it
        wanted["num_frames"] = None
    for name, value in wanted.items():
        if fields.get(name) not in (None, value):
            raise UserError(f"{where}: {name} is {shown(fields[name])}; supported for videos: {value!r}")
    numbers = (rule.fps, rule.min_frames, rule.max_frames, rule.min_pixels, rule.max_pixels, rule.max_tokens)
    is_usable = all(isinstance(number, int | float) and number > 0 for number in numbers)
    if not is_usable or not FRAMES <= rule.min_frames <= rule.max_frames <= MOST_FRAMES_SEEN:
        raise UserError(f"{where}: no rule for videos: fps, frames, pixels and tokens are {shown(numbers)}")
