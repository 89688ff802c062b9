"""Sound files: is a file complete, how long is it, and its waveform at a model's rate.

PyAV decodes and soxr resamples (the extra `audio`), with the steps of librosa.load, by which processors
read sounds: the mean of all channels, resampled in high quality, rounded up to whole samples.

Where packets say exactly how many samples they hold (WAV, AIFF, FLAC, MP3 with LAME's header), only the last one is
decoded to measure a file; of other files all are.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.data.media.containers import MOST_PACKETS, SOUNDS, open_container
from megatron.vlm.data.media.crc import opened
from megatron.vlm.data.media.endings import missing_end
from megatron.vlm.data.media.videos import check_file
from omnibal_ext.errors import Rejected, UserError, how_to_install
from omnibal_ext.modalities.place import Mark, Place
from omnibal_ext.reading.memory import limited_memory

if TYPE_CHECKING:
    from av import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import InputContainer

EXACT = (
    *((container, codec) for container, order in (("wav", "le"), ("aiff", "be"))
      for codec in ("pcm_u8", "pcm_s8", f"pcm_s16{order}", f"pcm_s24{order}", f"pcm_s32{order}")),
    ("flac", "flac"),
)  # fmt: skip
"""Containers and codecs whose packets hold as many samples as they say. Floats are decoded: they may be no numbers."""
MOST_SECONDS = 3600
MOST_SAMPLES = MOST_SECONDS * 96000
"""Most samples of all channels together: an hour of two at 48 kHz. Silence of years fits a file of megabytes."""
BLOCK = 2**16
"""Samples that are resampled at a time."""
RATES = range(1000, 768001)
UNSURE = "g726"
"""Part of the names of codecs that FFmpeg and libsndfile decode to different sounds."""
SCALES = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31}
"""Full scale of integer samples; 24 bits come as the upper ones of 32."""
LOUDEST = 2.0**16
"""Largest floating-point samples, which have no limit of their own: powers of more overflow."""


def require_hearing(why: str) -> None:
    """Raise UserError, "WHY: what to install", if packages that read sounds are missing or too old."""
    try:
        import soxr  # noqa: F401
        from av import Packet
    except ImportError as error:
        raise UserError(
            f"{why}: reading sounds needs packages that are not installed: {how_to_install('audio')}"
        ) from error
    if not hasattr(Packet, "get_sidedata"):
        raise UserError(f"{why}: this PyAV does not say where sounds begin: pip install --upgrade av")


def sound_length(path: Path, place: Place, rate: int, decode: bool = False) -> int:
    """Return the number of samples of a usable sound at `rate` a second; `place`: it is there inside the file `path`.

    `decode` decodes it entirely, which also finds flipped bits. Raises `Rejected`: missing_audio, unreadable_audio,
    empty_audio, not_audio, truncated_audio, no_audio, too_long_audio. UserError where packages are missing.
    """
    require_hearing(str(path))
    check_file(path, "audio")
    try:
        with opened(path, place) as file, limited_memory():
            return _measured(path, file, rate, decode)
    except (OSError, ValueError, IndexError, UserError) as error:  # of the file or place: FFmpeg's are rejects
        raise Rejected("unreadable_audio", f"{path}: {str(error)[:200]}") from error


def _measured(path: Path, file: BinaryIO, rate: int, decode: bool) -> int:
    if not file.seek(0, os.SEEK_END):
        raise Rejected("empty_audio", f"{path}: zero bytes")
    try:
        with _rejected("not_audio"), _container(file) as container:
            stream, name = sound_stream(container), container.format.name
            own_rate, most = stream.rate, _most_seconds(stream)
            with _rejected("truncated_audio"):
                scan = _scanned(container)
                missing = scan.missing or missing_end(name, file)
        if not missing and (decode or scan.samples is None):
            with _rejected("truncated_audio"), _container(file) as container:
                scan.samples = sum(map(len, _waves(container, decode)))
    except Rejected as verdict:
        raise Rejected(verdict.reason, f"{path}: {verdict.detail}") from verdict
    if missing:
        raise Rejected("truncated_audio", f"{path}: {missing}; copy it again")
    if not scan.samples:
        raise Rejected("empty_audio", f"{path}: no sound in it")
    if (seconds := scan.samples / own_rate) > most:
        raise Rejected("too_long_audio", f"{path}: {seconds:.0f} seconds, limit {most:.0f}; cut it")
    return _resampled_length(scan.samples, own_rate, rate)


@contextmanager
def _rejected(reason: str) -> Iterator[None]:
    """Make a context in which any failure becomes `Rejected`: a broken file makes FFmpeg raise nearly anything."""
    try:
        yield
    except Rejected:
        raise
    except Exception as error:
        raise Rejected(reason, str(error)[:200]) from error


def _most_seconds(stream: "AudioStream") -> float:
    return min(MOST_SECONDS, MOST_SAMPLES / (stream.rate * max(1, stream.channels)))


def _resampled_length(samples: int, own_rate: int, rate: int) -> int:
    return -(-samples * rate // own_rate)


def _container(file: BinaryIO) -> AbstractContextManager["InputContainer"]:
    return open_container(file, SOUNDS, "not_audio")


def sound_stream(container: "InputContainer") -> "AudioStream":
    """Return the audio stream of an opened file or video. Raises `Rejected` (no_audio, not_audio) if none is usable."""
    from av.audio.stream import AudioStream

    stream = container.streams.best("audio")
    if not isinstance(stream, AudioStream):
        raise Rejected("no_audio", "has no sound")
    if stream.rate not in RATES:
        raise Rejected("not_audio", f"{stream.rate} samples a second, supported are {RATES[0]} to {RATES[-1]}")
    if UNSURE in stream.codec_context.name:
        raise Rejected("not_audio", f"of the codec {stream.codec_context.name}, which programs read differently")
    return stream


@dataclass(slots=True)
class _Scan:
    """Length of a sound by its packets, and whether it is complete."""

    samples: int | None
    """Number of samples; None: packets do not say it exactly."""
    missing: str
    """How the sound is cut; "" if it is complete."""


def _scanned(container: "InputContainer") -> _Scan:
    """Measure a sound by its packets, without decoding; of FLAC the last one is decoded, to see whether it is cut."""
    stream, container_name = sound_stream(container), container.format.name
    ticks, trimmed, sizes, corrupt, last, has_trims = 0, 0, [0], False, None, False
    for number, packet in enumerate(container.demux(stream)):
        if number == MOST_PACKETS:
            raise Rejected("too_long_audio", f"more than {MOST_PACKETS} packets; cut it")
        if not packet.size:
            continue
        ticks, last, corrupt = ticks + (packet.duration or 0), packet, corrupt or packet.is_corrupt
        sizes.append(packet.size)
        if packet.has_sidedata("skip_samples"):
            skipped = bytes(packet.get_sidedata("skip_samples"))
            has_trims, trimmed = True, trimmed + sum(int.from_bytes(skipped[at : at + 4], "little") for at in (0, 4))
    at_rate = (stream.time_base or Fraction(0)) * stream.rate
    samples, said = int(ticks * at_rate) - trimmed, int((stream.duration or 0) * at_rate)
    codec = stream.codec_context.name
    exact = (container_name, codec) in EXACT or (container_name == "mp3" and has_trims)
    if corrupt and container_name != "wav":  # where lengths that nobody knew look so
        return _Scan(None, f"ends inside packet {len(sizes) - 1}")
    if exact and samples < said:
        return _Scan(None, f"{samples} samples where the file says {said}")
    found = samples if codec.startswith("pcm_") else len(sizes) - 1  # of which each sample is a frame
    if found < stream.frames and container_name not in ("wav", "aiff"):
        return _Scan(None, f"{found} frames where the file says {stream.frames}")
    if container_name == "mp3" and not exact and sizes[-1] < min(sizes[1:]) - 1:
        return _Scan(None, "ends inside a frame")
    if codec == "flac" and last is not None:  # of which each can be decoded alone
        last.decode()
    return _Scan(samples if exact else None, "")


def load_sound(
    path: Path, place: Place, rate: int, crc: Mark | None = None, strict: bool = False
) -> NDArray[np.float32]:
    """Decode a sound to its waveform at `rate` a second, from -1 to 1: float32 [samples].

    `strict`: damage raises an error instead of being concealed by the decoder. Raises FFmpeg's errors, Rejected if it
    cannot be heard, and ChangedError if its mark is not `crc` (None: any).
    """
    import soxr

    with opened(path, place, crc) as file, _container(file) as container:
        own_rate = sound_stream(container).rate
        waves = _waves(container, strict)
        if own_rate == rate:
            return _joined(waves)
        # What is resampled block by block equals what is resampled at once, which takes the memory of both.
        stream, samples = soxr.ResampleStream(own_rate, rate, 1, quality="soxr_hq"), 0
        parts = list[NDArray[np.float32]]()
        for wave in _blocks(waves):
            samples += len(wave)
            parts.append(stream.resample_chunk(wave))
        parts.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    length = _resampled_length(samples, own_rate, rate)
    resampled = _joined(parts)[:length]
    return np.pad(resampled, (0, length - len(resampled)))


def _joined(parts: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
    return np.concatenate([np.zeros(0, np.float32), *parts])


def _blocks(waves: Iterable[NDArray[np.float32]]) -> Iterator[NDArray[np.float32]]:
    """Yield the same samples in arrays of at least `BLOCK` samples, and one of what is left."""
    held, samples = list[NDArray[np.float32]](), 0
    for wave in waves:
        held.append(wave)
        samples += len(wave)
        if samples >= BLOCK:
            yield _joined(held)
            held, samples = [], 0
    yield _joined(held)


def _waves(container: "InputContainer", strict: bool) -> Iterator[NDArray[np.float32]]:
    """Yield the mean of all channels, part by part: float32 [samples]. Raises Rejected for what is no sound."""
    stream = sound_stream(container)
    rate, channels = stream.rate, stream.channels
    left = int(_most_seconds(stream) * rate)
    if strict:
        stream.codec_context.options = {"err_detect": "crccheck+explode"}
    for frame in container.decode(stream):
        if frame.sample_rate != rate or frame.layout.nb_channels != channels:
            raise Rejected("not_audio", "the rate or the channels of the sound change")
        if (left := left - frame.samples) < 0:
            limit = f"{_most_seconds(stream):.0f} seconds of {channels} channels"
            raise Rejected("too_long_audio", f"more than {limit}; cut it")
        wave = _samples_of(frame, channels)
        if not np.abs(wave).max(initial=0) <= LOUDEST:  # false for NaN too
            raise Rejected("not_audio", f"samples that are no numbers, or above {LOUDEST:g} times full scale")
        yield wave


def _samples_of(frame: "AudioFrame", channels: int) -> NDArray[np.float32]:
    """Average a frame's channels, side by side in memory as soundfile has them: so sums of many are rounded alike."""
    found, kind = frame.to_ndarray(), frame.format.name.removesuffix("p")
    each = found.T if frame.format.is_planar else found.reshape(-1, channels)
    values = np.ascontiguousarray(each, dtype=np.float32)
    if kind in SCALES:
        values = (values - (SCALES["u8"] if kind == "u8" else 0)) / np.float32(SCALES[kind])
    elif kind not in ("flt", "dbl"):
        raise Rejected("not_audio", f"samples of format {kind!r}")
    with np.errstate(invalid="ignore", over="ignore"):  # refused by the caller
        mean: NDArray[np.float32] = values.T.mean(axis=0) if channels > 1 else values[:, 0]
    return mean
