"""Sounds of a pack: their mel frames, zeros where one cannot be read."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import NamedTuple

import torch

from megatron.vlm.data.dataset import Sample
from megatron.vlm.data.inputs.reader import Broken, InputReader
from megatron.vlm.media import Media
from omnibal_ext.errors import UserError
from omnibal_ext.image_assignment import Units
from omnibal_ext.modalities.audio.sounds import Sound


class Heard(NamedTuple):
    """A sound of a pack."""

    sample: Sample
    sound: Sound


class SoundReader(InputReader):
    """Sounds. Those of a sample are a unit: some encoders pad each to the longest."""

    def media(self, samples: Sequence[Sample], begins: Sequence[int], reads_tokens: bool) -> Media:
        """Mel frames of each sound."""
        return Media(self.units(samples))

    def parts(self, samples: Sequence[Sample]) -> list[Heard]:
        """All sounds."""
        return [Heard(sample, sound) for sample in samples for sound in sample.sounds]

    def read(self, media: Media, parts: Sequence[Heard], decodes: bool = True) -> tuple[Media, Broken]:
        """With log-mel frames fp32 [frames, mel bins]."""
        assert self.data.sound_rule is not None
        bins, broken = self.data.sound_rule.encoder.mel_bins, dict[int, str]()
        if not decodes or not media.amount:
            return replace(media, values=torch.empty(media.amount, bins, device="meta")), broken
        mels = []
        for sample, sound in parts:
            try:
                mels.append(sample.hear(sound))
            except UserError as error:
                broken.setdefault(sample.number, str(error))
                mels.append(torch.zeros(sound.frames, bins))  # the other ranks expect this shape
        return replace(media, values=torch.cat(mels)), broken

    def units(self, samples: Sequence[Sample]) -> Units:
        """Mel frames of each sample's sounds; () if there are none."""
        found = tuple(tuple(sound.frames for sound in sample.sounds) for sample in samples)
        return found if any(found) else ()

    def share(self, samples: Sequence[Sample], units: Units, encodes: Sequence[bool]) -> tuple[Media, list[Heard]]:
        """The sounds of the samples that a rank encodes."""
        return Media(units, tuple(encodes)), self.parts([*compress(samples, encodes)])
