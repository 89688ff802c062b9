"""Random inputs of --check beyond images, in the form of transformers' models too; a registry by size."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.vlm.hf.pack_inputs import padded_sounds
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.film.architecture import FilmArchitecture
from omnibal_ext.modalities.modality import AUDIO, FILM, Size


@dataclass(frozen=True)
class Further:
    """Inputs of one modality in the check: how they are drawn, and given to transformers' model."""

    units: tuple[tuple[int, ...], ...]
    """Number of units of each random sample's inputs."""
    shape: Callable[[Architecture], tuple[int, ...]]
    """Returns the shape of one unit."""
    given: Callable[[Sequence[Tensor]], dict[str, Tensor]]
    """Turns a sample's inputs, each [units, *shape], into arguments of transformers' model; none: {}."""

    def random(self, model: Architecture, number: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Draw the inputs of random sample `number`."""
        return tuple(torch.randn(count, *self.shape(model), generator=generator) for count in self.units[number])


def _mels(model: Architecture) -> tuple[int, ...]:
    return (AudioArchitecture.among(model.further).mel_bins,)


def _pixels(model: Architecture) -> tuple[int, ...]:
    return (3, *[FilmArchitecture.among(model.further).image_size] * 2)


def _stacked(films: Sequence[Tensor]) -> dict[str, Tensor]:
    """Stack frames of videos that have an encoder of their own."""
    return {"pixel_values_videos": torch.stack(list(films))} if films else {}


FURTHER_INPUTS: Mapping[Size, Further] = {
    AUDIO.size: Further(((), (250,), (40, 333)), _mels, padded_sounds),
    FILM.size: Further(((), (2, 2), (3,)), _pixels, _stacked),
}
