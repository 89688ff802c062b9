"""Readers of images, videos and sounds. Each trial damages one file, and only that is read."""

import base64
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megatron.vlm.data.media.images import MAX_PIXELS, image_size, load_rgb
from megatron.vlm.data.media.sounds import load_sound, sound_length
from megatron.vlm.data.media.videos import read_frames, video_facts
from tests.fuzz.reader import Files, Reader, trained_on
from tests.unit.data.clips import noise, write_talkie, write_video
from tests.unit.data.noises import chirp, encoded


def media_readers() -> dict[str, Reader]:
    return {"images": _images(), "places": _places(), "videos": _videos(), "sounds": _sounds()}


def _reader(files: Files, measure: Callable[[Path], Any], show: Callable[[Path, Any], Any]) -> Reader:
    """What preprocessing measures, or rejects, and training shows, which names the file for whatever is raised."""

    def read(folder: Path) -> None:
        for name in sorted(files):
            if (folder / name).read_bytes() == files[name]:
                continue
            found = measure(folder / name)
            trained_on(lambda path, found=found: show(path, found))(folder / name)

    return Reader(files, read)


def _images() -> Reader:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {}
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "JPEG2000", "PPM"):
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, kind, **({"exif": exif} if kind in ("PNG", "JPEG", "WEBP", "TIFF") else {}))
        files[f"image.{kind.lower()}"] = out.getvalue()

    def measure(path: Path) -> None:
        image_size(path)
        image_size(path, decode=True)

    return _reader(files, measure, lambda path, _: load_rgb(path))


def _places() -> Reader:
    """An image that stands in a line of conversations, as base64."""
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "PNG")
    content = base64.b64encode(out.getvalue())
    place = ("base64", 1, len(content))
    return Reader({"line.txt": b'"' + content + b'"'}, lambda folder: image_size(folder / "line.txt", place=place))


def _videos() -> Reader:
    films = noise(6, 32, 24)
    with tempfile.TemporaryDirectory() as folder:
        for ending, codec in (("mp4", "mpeg4"), ("mkv", "mpeg4"), ("avi", "mjpeg"), ("ts", "mpeg4")):
            write_video(Path(folder) / f"video.{ending}", films, 25 if ending == "ts" else 3, codec)
        write_talkie(Path(folder) / "heard.mkv", films, 3, chirp(32000, 16000))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return _reader(
        files,
        lambda path: video_facts(path, (), MAX_PIXELS),
        lambda path, facts: list(read_frames(path, (), range(min(facts.frames, 16)))),
    )


def _sounds() -> Reader:
    wave, files = chirp(3000, 16000, 2), dict[str, bytes]()
    for container, codec in (("wav", "pcm_s16le"), ("flac", "flac"), ("mp3", "libmp3lame"), ("ogg", "libopus"),
                             ("ipod", "aac"), ("matroska", "aac"), ("aiff", "pcm_s16be")):  # fmt: skip
        files[f"sound.{container}"] = encoded(wave, 48000, codec, container)
    return _reader(files, lambda path: sound_length(path, (), 16000), lambda path, _: load_sound(path, (), 16000))
