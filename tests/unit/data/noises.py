"""Sounds made of tones and noise, and files of them."""

import io
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tests.demo import turns

LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}
TURNS = turns("<audio>\nWhat is said?", "A cat.")


def chirp(samples: int, rate: int = 16000, channels: int = 1, seed: int = 0) -> np.ndarray:
    """A rising tone a channel, and noise: float32 [channels, samples]."""
    generator, seconds = np.random.default_rng(seed), np.arange(samples) / rate
    tones = (np.sin(2 * np.pi * (220 + 110 * channel) * seconds * (1 + seconds / 7)) for channel in range(channels))
    return np.stack([0.3 * tone + 0.05 * generator.standard_normal(samples) for tone in tones]).astype(np.float32)


class Pipe(io.RawIOBase):
    """What is written can be read again and not changed."""

    def __init__(self) -> None:
        self.content = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, part: Any) -> int:
        self.content += part
        return len(part)


def encoded(
    wave: np.ndarray,
    rate: int,
    codec: str,
    container: str,
    faststart: bool = False,
    piped: bool = False,
    **options: str,
) -> bytes:
    import av

    layout, moved = LAYOUTS[len(wave)], {"movflags": "faststart"} if faststart else {}
    if "movflags" in options:
        moved = {"movflags": options.pop("movflags")}
    pipe = Pipe()
    with (
        tempfile.NamedTemporaryFile() as content,
        av.open(pipe if piped else content.name, "w", format=container, container_options=moved) as file,
    ):
        stream = file.add_stream(codec, rate=rate, layout=layout, options=options)
        for start in range(0, wave.shape[1], 1024):
            part = np.ascontiguousarray(wave[:, start : start + 1024])
            frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=layout)
            frame.sample_rate, frame.pts, frame.time_base = rate, start, Fraction(1, rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
        file.close()
        return bytes(pipe.content) if piped else Path(content.name).read_bytes()


def write_wav(path: Path, wave: np.ndarray, rate: int = 16000) -> None:
    path.write_bytes(encoded(wave, rate, "pcm_s16le", "wav"))
