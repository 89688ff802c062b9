"""Sounds of a pack: their mel frames, zeros where one cannot be read."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.vlm.data.inputs.reader import RowReader
from megatron.vlm.data.media.mel import log_mels
from megatron.vlm.data.media.sounds import load_sound, require_hearing
from megatron.vlm.data.sample import Sample
from omnibal_ext.modalities.audio.sounds import Sound, SoundRule
from omnibal_ext.modalities.modality import AUDIO


class SoundReader(RowReader):
    """Sounds: log-mel frames fp32 [frames, mel bins]."""

    modality = AUDIO

    def require(self) -> None:
        """Raise UserError naming what to install if the dataset has sounds and packages that read them are missing."""
        if self.data.amounts[AUDIO].any():
            require_hearing(str(self.data.folder))

    @property
    def rule(self) -> SoundRule:
        """Rule of the dataset for its sounds: sample rate, mel frames, seconds that are heard."""
        rule = self.data.further_rules[AUDIO]
        assert isinstance(rule, SoundRule)
        return rule

    @property
    def width(self) -> int:
        """Number of mel bins."""
        return self.rule.encoder.mel_bins

    def _decoded(self, root: Path, path: Path, item: Sound) -> Tensor:
        """Decode a sound: log-mel frames, fp32 [frames, mel bins]."""
        rule, (crc,) = self.rule, item.crcs or (None,)
        wave = load_sound(path, item.place, rule.rate, crc)
        if len(wave) != item.samples:
            raise ValueError(f"{len(wave)} samples where {item.samples} were preprocessed")
        return log_mels(rule, wave)

    def arguments(self, sample: Sample) -> dict[str, Any]:
        """Return input_features fp32 [frames, mel bins] of all sounds, feature_lengths int64 [sounds], the frames of
        each, and turns (`Sample.turns`)."""
        lengths = torch.tensor([sound.frames for sound in sample.items(AUDIO)], dtype=torch.long)
        features = self.decode_all(sample)
        return {"input_features": features, "feature_lengths": lengths, "turns": tuple(sample.turns)}
