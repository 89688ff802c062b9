"""What a model hears of a sound: log-mel frames, as transformers' WhisperFeatureExtractor computes them.

Its powers in the bands of Slaney's mel scale, their logarithm, at most 8 decades below the loudest, scaled; equal to
the extractor's, bit for bit, for one sound alone.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.vlm.data.formats.rows import Place
from omnibal_ext.modalities.audio.architecture import AudioArchitecture

SILENCE = 16000
"""Zeros behind a sound that is padded: the extractor adds minutes of them, which change nothing more."""


@dataclass(frozen=True, slots=True)
class Sound:
    """One sound of a sample: its path below the root of media, and what the model hears of it.

    `place`: set for a sound inside the input file; `path` is its name there. `crcs`: CRC-32 of the file, or ().
    """

    path: str
    samples: int
    """Of the whole sound, at the model's rate."""
    frames: int
    """Mel frames."""
    tokens: int
    """LLM tokens."""
    place: Place = ()
    crcs: tuple[int, ...] = ()
    video: int = -1
    """Of a video's own sound: which of the sample's images it is; -1: a sound alone."""
    turns: tuple[int, ...] = ()
    """Of a video's own sound: lengths of alternating runs of the video's tokens and the sound's (`token_turns`)."""


@dataclass(frozen=True, slots=True)
class SoundRule:
    """How a model hears: what its feature extractor does, and its encoder."""

    encoder: AudioArchitecture
    rate: int = 16000
    """Samples a second."""
    window: int = 400
    """Samples that a frame sees."""
    hop: int = 160
    """Samples from one frame to the next."""
    longest: int | None = None
    """Seconds that are heard, from the beginning; shorter sounds are padded with silence, which their last frames see.
    None: everything is heard, and the last frames see the end mirrored."""

    def __str__(self) -> str:
        """As preprocessing prints it."""
        heard = "all of it" if self.longest is None else f"the first {self.longest} seconds"
        return f"{self.rate} samples a second, {self.rate / self.hop:g} frames, {heard}"

    def heard(self, samples: int) -> int:
        """How many of a sound's samples are heard."""
        return samples if self.longest is None else min(samples, self.longest * self.rate)

    def frames(self, samples: int) -> int:
        """Mel frames of a sound; 0 if it is too short to have any."""
        if self.longest is not None:
            return -(-self.heard(samples) // self.hop)
        return samples // self.hop if samples > self.window // 2 else 0

    def tokens(self, samples: int) -> int:
        """LLM tokens of a sound; 0 if it is too short to be heard."""
        frames = self.frames(samples)
        return self.encoder.tokens(frames) if frames else 0

    def features(self, wave: NDArray[np.float32]) -> Tensor:
        """Log-mel frames of a waveform [samples], of which `tokens` gives some: fp32 [frames, mel bins]."""
        heard = torch.from_numpy(wave[: self.heard(len(wave))])
        if self.longest is not None:
            space = self.longest * self.rate - len(heard)
            heard = torch.nn.functional.pad(heard, (0, min(SILENCE - len(heard) % self.hop, space)))
        spectrum = torch.stft(heard, self.window, self.hop, window=torch.hann_window(self.window), return_complex=True)
        powers = (spectrum[..., :-1].abs() ** 2).contiguous()
        bands = torch.from_numpy(mel_bands(self.encoder.mel_bins, self.window, self.rate)).T @ powers
        logs = torch.clamp(bands, min=1e-10).log10()
        scaled = (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0
        return scaled[:, : self.frames(len(wave))].T.contiguous()


@cache
def mel_bands(bands: int, window: int, rate: int, highest: float = 8000.0) -> NDArray[np.float32]:
    """Weights of frequencies in each band: fp32 [window // 2 + 1, bands].

    Triangles, evenly spaced on Slaney's mel scale from 0 to `highest` Hz and of equal area (Auditory Toolbox, 1998).
    """
    edges = _hertz(np.linspace(0.0, _mels(highest), bands + 2))
    slopes = edges[None] - np.linspace(0, rate // 2, window // 2 + 1)[:, None]
    widths = np.diff(edges)
    triangles = np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return (triangles * (2.0 / (edges[2:] - edges[:-2]))[None]).astype(np.float32)


def _mels(hertz: float) -> float:
    """Linear up to 1000 Hz, logarithmic above (`hertz` is)."""
    return float(15.0 + np.log(hertz / 1000.0) * (27.0 / np.log(6.4)))


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    hertz: NDArray[np.float64] = 200.0 * mels / 3.0
    above = mels >= 15.0
    hertz[above] = 1000.0 * np.exp(np.log(6.4) / 27.0 * (mels[above] - 15.0))
    return hertz
