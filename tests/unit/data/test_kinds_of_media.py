"""Every kind of sound and picture that the usual libraries write is read as they read it, or refused by a reason."""

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, features

from megatron.vlm.data.media.images import image_size, load_rgb
from omnibal_ext.errors import Rejected

av = pytest.importorskip("av")
soundfile = pytest.importorskip("soundfile")
pytest.importorskip("soxr")

from megatron.vlm.data.media.sounds import load_sound, sound_length  # noqa: E402
from tests.unit.data.noises import chirp, encoded  # noqa: E402

RATE = 16000
READ = ("WAV", "WAVEX", "RF64", "AIFF", "FLAC", "MP3", "OGG")
"""Of soundfile's formats those in containers that are read."""
ROUNDED = {"IMA_ADPCM": 5e-3, "MS_ADPCM": 2e-2, "OPUS": 0.2}
"""How far libsndfile's samples are from FFmpeg's; it decodes Opus at the file's rate, FFmpeg at 48 kHz."""
REFUSED = {"G721_32", "NMS_ADPCM_16", "NMS_ADPCM_24", "NMS_ADPCM_32"}
SOUNDS = [
    (kind, codec, channels)
    for kind in READ if kind in soundfile.available_formats()
    for codec in soundfile.available_subtypes(kind)
    for channels in (1, 2)
    if soundfile.check_format(kind, codec) and not codec.startswith("DWVW") and (channels == 1 or codec not in REFUSED)
]  # fmt: skip


def test_sixty_kinds_of_sounds_and_more_are_as_soundfile_reads_them(tmp_path: Path) -> None:
    wave, unlike, read = chirp(11207, RATE, 2).T, [], 0
    for kind, codec, channels in SOUNDS:
        path = tmp_path / f"{kind}.{codec}.{channels}"
        try:
            soundfile.write(path, wave[:, :channels], RATE, format=kind, subtype=codec)
        except soundfile.LibsndfileError:
            continue  # of an encoder that is not there
        wanted = soundfile.read(path, dtype="float32", always_2d=True)[0].mean(axis=1)
        if codec in REFUSED or (kind, codec) == ("AIFF", "GSM610"):
            try:
                sound_length(path, (), RATE)
                unlike.append((kind, codec, "read"))
            except Rejected:
                continue
        found = load_sound(path, (), RATE)
        lengths = {sound_length(path, (), RATE), sound_length(path, (), RATE, decode=True), len(found)}
        behind = len(found) - len(wanted)  # Vorbis' last block, of which FFmpeg keeps all
        off = np.abs(found[: len(wanted)] - wanted).max()
        read += 1
        if len(lengths) > 1 or off > ROUNDED.get(codec, 1e-4) or not 0 <= behind <= 64 * (codec == "VORBIS"):
            unlike.append((kind, codec, channels, lengths, len(wanted), off))
    assert not unlike
    assert read >= 60


@pytest.mark.parametrize("kind", sorted({*soundfile.available_formats()} - {*READ, "RAW"}))
def test_a_kind_of_sound_that_is_not_read_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "sound"
    soundfile.write(path, chirp(4000)[0], RATE, format=kind, subtype=soundfile.default_subtype(kind))
    with pytest.raises(Rejected, match="not_audio"):
        sound_length(path, (), RATE)


STREAMED = {
    "MP3": ("libmp3lame", "mp3"), "Opus": ("libopus", "ogg"), "FLAC": ("flac", "flac"),
    "FLAC in OGG": ("flac", "ogg"), "WAV": ("pcm_s16le", "wav"), "WebM": ("libopus", "webm"),
    "MKV": ("pcm_s16le", "matroska"), "MP4": ("aac", "mp4"), "MOV": ("pcm_s16le", "mov"),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("rate", [RATE, 48000])
def test_a_sound_that_was_written_to_a_pipe_is_whole(tmp_path: Path, name: str, rate: int) -> None:
    """Nothing can be corrected there when the sound has ended: headers lack the length, fragments follow each other."""
    codec, container = STREAMED[name]
    fragments = {"movflags": "frag_keyframe+empty_moov"} if container in ("mp4", "mov") else {}
    content = encoded(chirp(2 * rate, rate), rate, codec, container, piped=True, **fragments)
    (tmp_path / "sound").write_bytes(content)
    with av.open(io.BytesIO(content)) as file:
        samples, own_rate = sum(frame.samples for frame in file.decode(audio=0)), file.streams.audio[0].rate
    length = sound_length(tmp_path / "sound", (), RATE)
    assert length == len(load_sound(tmp_path / "sound", (), RATE)) == math.ceil(samples * RATE / own_rate)
    assert abs(length - 2 * RATE) < 2500  # a block of the codec


def picture(mode: str = "RGB", seed: int = 0) -> Image.Image:
    made = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (30, 40, 4), np.uint8), "RGBA")
    return made.convert("RGB").convert(mode) if mode != "RGBA" else made


SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
SAVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"PNG {mode}": ("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")},
    "PNG with ICC": ("PNG", "RGB", {"icc_profile": SRGB}), "PNG of 2 bits": ("PNG", "P", {"bits": 2}),
    "PNG transparent": ("PNG", "P", {"transparency": 3}), "PNG, a color": ("PNG", "RGB", {"transparency": (1, 2, 3)}),
    **{f"JPEG {mode}": ("JPEG", mode, {}) for mode in ("L", "RGB", "CMYK")},
    "JPEG progressive": ("JPEG", "RGB", {"progressive": True}), "JPEG with ICC": ("JPEG", "RGB", {"icc_profile": SRGB}),
    "JPEG 4:4:4": ("JPEG", "RGB", {"subsampling": 0}), "JPEG 4:2:0": ("JPEG", "RGB", {"subsampling": 2}),
    "JPEG of best quality": ("JPEG", "RGB", {"quality": 100}), "JPEG of the least": ("JPEG", "RGB", {"quality": 1}),
    "JPEG with restarts": ("JPEG", "RGB", {"restart_marker_rows": 1}), "JPEG, CMYK with ICC": ("JPEG", "CMYK", {}),
    "JPEG with a comment": ("JPEG", "RGB", {"comment": b"\xff\xd9"}), "MPO": ("MPO", "RGB", {}),
    "WebP": ("WEBP", "RGB", {}), "WebP lossless": ("WEBP", "RGB", {"lossless": True}),
    "WebP RGBA": ("WEBP", "RGBA", {}), "WebP, exact": ("WEBP", "RGBA", {"lossless": True, "exact": True}),
    "WebP with ICC": ("WEBP", "RGB", {"icc_profile": SRGB}),
    "GIF": ("GIF", "P", {}), "GIF L": ("GIF", "L", {}), "GIF interlaced": ("GIF", "P", {"interlace": 1}),
    **{f"BMP {mode}": ("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")},
    **{f"TIFF {mode}": ("TIFF", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")},
    **{f"TIFF {way}": ("TIFF", "RGB", {"compression": way})
       for way in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")},
    **({f"AVIF {mode}": ("AVIF", mode, {}) for mode in ("L", "RGB", "RGBA")} if features.check("avif") else {}),
}  # fmt: skip


def test_forty_kinds_of_pictures_and_more_are_as_pillow_reads_them(tmp_path: Path) -> None:
    assert len(SAVED) >= 40
    for name, (kind, mode, options) in SAVED.items():
        path = tmp_path / name.replace(":", "")
        picture(mode).save(path, kind, **options)
        wanted = Image.open(path).convert("RGB")
        for decode in (False, True):
            assert image_size(path, decode=decode) == wanted.size, name
        np.testing.assert_array_equal(load_rgb(path), wanted, name)


@pytest.mark.parametrize("name", SAVED)
def test_a_tail_that_is_cut_is_found_or_leaves_all_pixels(tmp_path: Path, name: str) -> None:
    kind, mode, options = SAVED[name]
    path = tmp_path / "image"
    picture(mode).save(path, kind, **options)
    whole = path.read_bytes()
    for length in {len(whole) - 1, len(whole) - 8, len(whole) * 3 // 4, len(whole) // 2, 20}:
        path.write_bytes(whole[:length])
        try:
            size = image_size(path, decode=True)
        except Rejected:
            continue
        read: Callable[[], Any] = lambda: Image.open(path).convert("RGB")  # noqa: E731
        assert size == (40, 30)
        np.testing.assert_array_equal(load_rgb(path), read())  # which raises where pixels are missing
