"""Shapes of an audio encoder's weights that are no matrices."""

from itertools import pairwise
from typing import TYPE_CHECKING

from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.weights import Shape, layer_norms, norm

if TYPE_CHECKING:
    from omnibal_ext.architectures.architecture import Architecture


def weights(model: "Architecture", kind: str, name: str) -> dict[str, Shape]:
    """Return {name: shape} of weights, other than matrices, that layers of a kind with cost key `name` may have."""
    audio = AudioArchitecture.among(model.further)
    match kind:
        case "audio_embed":
            return _embed(audio)
        case "audio":
            return layer_norms(audio.hidden_size)
        case _:
            return norm("norm", audio.hidden_size)


def _embed(audio: AudioArchitecture) -> dict[str, Shape]:
    widths = (1, *[audio.channels] * 3) if audio.channels else (audio.mel_bins, audio.hidden_size, audio.hidden_size)
    found: dict[str, Shape] = {"projection.weight": (audio.hidden_size, audio.channels * audio.halved(audio.mel_bins))}
    for number, (before, after) in enumerate(pairwise(widths)):
        side = (3, 3) if audio.channels else (3,)
        found |= {f"convolutions.{number}.weight": (after, before, *side), f"convolutions.{number}.bias": (after,)}
    return found
