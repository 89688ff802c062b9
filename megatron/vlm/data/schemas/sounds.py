"""Sounds as datasets list them, and how they were heard."""

from collections.abc import Mapping
from typing import Any

from megatron.vlm.data.media.sounds import MOST_SECONDS, RATES
from megatron.vlm.data.schemas.schema import MOST_INPUTS, Schema, as_tuples, mark_check, place_check
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.audio.sounds import Sound, SoundRule
from omnibal_ext.reading.checks import Check, flag, integer, listing, maybe, record, text

MOST_BINS = 2**10
MOST_SAMPLES = MOST_SECONDS * RATES[-1]
_INPUTS: Check[list[dict[str, Any]]] = listing(
    record(
        {
            "path": text,
            "samples": integer(1, MOST_SAMPLES),
            "frames": integer(1, MOST_SAMPLES),
            "tokens": integer(1, MOST_SAMPLES),
            "place": place_check,
            "crcs": listing(mark_check, most=1),
        },
        {"video": integer(-1, MOST_INPUTS), "turns": listing(integer(1, MOST_SAMPLES), most=MOST_SAMPLES)},
    ),
    most=MOST_INPUTS,
)


def _made(sounds: list[dict[str, Any]]) -> list[Sound]:
    for number, sound in enumerate(sounds):
        as_tuples(sound, f"sounds[{number}]")
    made = [Sound(**{name: sound[name] for name in Sound.__slots__ if name in sound}) for sound in sounds]
    if any(sound.turns and sum(sound.turns[1::2]) != sound.tokens for sound in made):
        raise UserError("the turns of a sound have other tokens than the sound")
    return made


_RULE = record(
    {
        "rate": integer(1, RATES[-1]),
        "window": integer(1, RATES[-1]),
        "hop": integer(1, RATES[-1]),
        "longest": maybe(integer(1, MOST_SECONDS)),
        "encoder": record(
            {"mel_bins": integer(1, MOST_BINS), "chunk": integer(1), "channels": integer(), "pooled": flag}
        ),
    }
)


def _made_rule(said: Mapping[str, Any]) -> SoundRule:
    rest = {name: value for name, value in said.items() if name != "encoder"}
    return SoundRule(AudioArchitecture(**said["encoder"]), **rest)


SCHEMA = Schema(_INPUTS, _made, _RULE, _made_rule)
