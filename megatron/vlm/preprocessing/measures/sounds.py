"""Sounds of a line, measured, and the rule by which a model hears them."""

from dataclasses import replace
from pathlib import Path

from megatron.vlm.data.media.sounds import MOST_SECONDS, RATES, sound_length
from megatron.vlm.preprocessing.line_media import LineMedia
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import CONFIG, OLD_PROCESSOR, PROCESSOR
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.families.media import SOUND_RULES
from omnibal_ext.families.processor_fields import read_fields, section
from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.audio.sounds import Sound, SoundRule
from omnibal_ext.modalities.modality import AUDIO
from omnibal_ext.modalities.place import Place
from omnibal_ext.reading.checks import shown
from omnibal_ext.reading.fields import Fields

FIELDS = {"sampling_rate": "rate", "n_fft": "window", "hop_length": "hop"}
"""Fields of a feature extractor -> of a `SoundRule`."""
NO_NOISE = {"dither": 0.0, "padding_value": 0.0, "do_normalize": False}


def sound(line: LineMedia, reference: str) -> Sound:
    """Measure a sound: samples, mel frames, tokens, CRC-32. Raises `Rejected`."""
    path, file, place = line.found(reference, "audio")
    return sound_of(line, path, file, place, "audio")


def sound_of(line: LineMedia, path: str, file: Path, place: Place, what: str) -> Sound:
    """Measure the sound of a file, or (`what`: "video") of a video; see `sound`."""
    rule = line.recipe.rules[AUDIO]
    assert isinstance(rule, SoundRule)
    samples = line.once(sound_length, file, place, rule.rate, line.recipe.decode_images)
    if not (tokens := rule.tokens(samples)):
        raise Rejected("too_short_audio", f"{file}: {samples / rule.rate:.3f} seconds are too short to be heard")
    return Sound(path, samples, rule.frames(samples), tokens, place, line.crcs([file], place, what))


def rule_of(model: Architecture) -> SoundRule:
    """Return the rule by which a model hears sounds: sample rate, mel frames, seconds."""
    return SOUND_RULES[model.prompt.image_markup](AudioArchitecture.among(model.further))


def rule_in(folder: Path, rule: SoundRule) -> tuple[SoundRule, str]:
    """Return the rule of the folder's feature extractor (Whisper's), and its file; `rule`: where it has none.

    Raises UserError naming a field that is not supported, or does not fit the encoder.
    """
    fields = _feature_extractor(folder)
    if fields is None:
        return rule, CONFIG
    where, bins = fields.where, rule.encoder.mel_bins
    for field, value in {"feature_size": bins, **NO_NOISE}.items():
        if fields.get(field) not in (None, value):
            raise UserError(f"{where}: {field} is {shown(fields[field])}; supported: {value!r}")
    numbers = {ours: fields.get(theirs, getattr(rule, ours)) for theirs, ours in FIELDS.items()}
    if rule.longest is not None:
        numbers["longest"] = fields.get("chunk_length", 30)  # transformers' default
    limits = {"rate": RATES[-1], "window": 2**14, "hop": numbers["window"], "longest": MOST_SECONDS}
    for ours, value in numbers.items():
        if not isinstance(value, int) or not 1 <= value <= limits[ours]:
            raise UserError(f"{where}: no rule for sounds: {ours} is {shown(value)}, must be 1 to {limits[ours]}")
    return replace(rule, **numbers), where.name


def _feature_extractor(folder: Path) -> Fields | None:
    newer = read_fields(folder / PROCESSOR)
    inner = (section(newer, name) for name in ("feature_extractor", "audio_processor"))
    for fields in (*inner, read_fields(folder / OLD_PROCESSOR)):
        if "feature_size" in fields or "feature_extractor_type" in fields:
            return fields
    return None
