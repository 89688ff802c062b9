"""Log-mel frames of a sound, as transformers' WhisperFeatureExtractor computes them.

They are powers in the bands of Slaney's mel scale, their logarithm, at most 8 decades below the loudest, scaled; equal
to the extractor's, bit for bit, for one sound alone.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnibal_ext.modalities.audio.sounds import SoundRule

SILENCE = 16000
"""Zeros behind a sound that is padded: the extractor adds minutes of them, which change nothing more."""


def log_mels(rule: SoundRule, wave: NDArray[np.float32]) -> Tensor:
    """Return the log-mel frames of a waveform [samples], up to the rule's longest sound: fp32 [frames, mel bins]."""
    heard = torch.from_numpy(wave[: rule.heard(len(wave))])
    if rule.longest is not None:
        space = rule.longest * rule.rate - len(heard)
        heard = torch.nn.functional.pad(heard, (0, min(SILENCE - len(heard) % rule.hop, space)))
    spectrum = torch.stft(heard, rule.window, rule.hop, window=torch.hann_window(rule.window), return_complex=True)
    powers = (spectrum[..., :-1].abs() ** 2).contiguous()
    bands = torch.from_numpy(mel_bands(rule.encoder.mel_bins, rule.window, rule.rate)).T @ powers
    logs = torch.clamp(bands, min=1e-10).log10()
    scaled = (torch.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0
    return scaled[:, : rule.frames(len(wave))].T.contiguous()


@cache
def mel_bands(bands: int, window: int, rate: int, highest: float = 8000.0) -> NDArray[np.float32]:
    """Return the weights of frequencies in each band: fp32 [window // 2 + 1, bands].

    Triangles, evenly spaced on Slaney's mel scale from 0 to `highest` Hz and of equal area (Auditory Toolbox, 1998).
    """
    edges = _hertz(np.linspace(0.0, _mels(highest), bands + 2))
    slopes = edges[None] - np.linspace(0, rate // 2, window // 2 + 1)[:, None]
    widths = np.diff(edges)
    triangles = np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return (triangles * (2.0 / (edges[2:] - edges[:-2]))[None]).astype(np.float32)


def _mels(hertz: float) -> float:
    """Convert a frequency above 1000 Hz to mels; below, the scale is linear."""
    return float(15.0 + np.log(hertz / 1000.0) * (27.0 / np.log(6.4)))


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    hertz: NDArray[np.float64] = 200.0 * mels / 3.0
    above = mels >= 15.0
    hertz[above] = 1000.0 * np.exp(np.log(6.4) / 27.0 * (mels[above] - 15.0))
    return hertz
