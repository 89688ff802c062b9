"""Short videos, as files and as frames, and words about them."""

import base64
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.demo import turns, written

TURNS = turns("<video>\nWhat happens?", "A cat jumps.")
OF_IMAGE = {"image": "b.png", "conversations": turns("<image>What?", "A cat jumps.")}
OF_WORDS = {"conversations": turns("Hi", "A cat jumps.")}


def noise(frames: int, width: int, height: int, seed: int = 0) -> np.ndarray:
    """uint8 [frames, height, width, 3], in blocks that survive a codec."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (frames, height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return coarse.repeat(4, axis=1).repeat(4, axis=2)[:, :height, :width]


def write_video(path: Path, frames: np.ndarray, rate: float, codec: str = "mpeg4") -> None:
    import av

    with av.open(path, "w") as container:
        stream = container.add_stream(codec, rate=round(rate * 1000) / 1000 if rate % 1 else int(rate))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = {"mpeg4": "yuv420p", "mjpeg": "yuvj420p"}.get(codec, "bgr0")
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def tar_of(path: Path, *members: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_frames(folder: Path, name: str, frames: np.ndarray) -> list[str]:
    """The frames as files of their own; their names."""
    names = [f"{name}{number}.png" for number in range(len(frames))]
    for file, frame in zip(names, frames, strict=True):
        Image.fromarray(frame).save(folder / file)
    return names


def write_picture(path: Path, width: int, height: int) -> None:
    Image.fromarray(noise(1, width, height)[0]).save(path)


def film_and_image(folder: Path, frames: int) -> list[dict[str, Any]]:
    """Conversations about frames of 56 x 84 pixels and about a picture of 56 x 112."""
    film = {"video": write_frames(folder, "f", noise(frames, 56, 84)), "fps": 2, "conversations": TURNS}
    write_picture(folder / "b.png", 56, 112)
    return [film, OF_IMAGE]


def inside(kind: str, folder: Path, field: str, contents: list[bytes], said: list[dict[str, str]]) -> Path:
    """A file of conversations about an image or a video each, with the bytes of these in it."""
    ending = {"image": "png", "video": "mp4"}[field]
    if kind == "tar":
        numbered = [(f"{number:03}", content) for number, content in enumerate(contents)]
        words = json.dumps({"conversations": said}).encode()
        files = [((f"{name}.json", words), (f"{name}.{ending}", content)) for name, content in numbered]
        return tar_of(folder / "set.tar", ("000.txt", b"no film"), *(member for pair in files for member in pair))
    if kind == "base64":
        urls = [f"data:{field}/{ending};base64,{base64.b64encode(content).decode()}" for content in contents]
        return written(folder / "set.jsonl", *({field: url, "conversations": said} for url in urls))
    table, parquet = pytest.importorskip("pyarrow").Table, pytest.importorskip("pyarrow.parquet")
    rows = [{field: {"bytes": content, "path": f"x.{ending}"}, "conversations": said} for content in contents]
    parquet.write_table(table.from_pylist(rows), folder / "set.parquet", compression="none", use_dictionary=False)
    return folder / "set.parquet"


def write_talkie(path: Path, frames: np.ndarray, rate: float, wave: np.ndarray, sound_rate: int = 16000) -> None:
    """A video with a sound, both lossless; the wave is [channels, samples]."""
    import av

    with av.open(path, "w") as container:
        film: Any = container.add_stream("ffv1", rate=round(rate))
        film.height, film.width, film.pix_fmt = *frames.shape[1:3], "bgr0"
        layout = {1: "mono", 2: "stereo"}[len(wave)]
        sound: Any = container.add_stream("pcm_s16le", rate=sound_rate, layout=layout)
        for frame in frames:
            container.mux(film.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(film.encode())
        samples = np.round(wave * 2**15).astype(np.int16).T.reshape(1, -1)
        said = av.AudioFrame.from_ndarray(samples, format="s16", layout=layout)
        said.sample_rate, said.pts = sound_rate, 0
        container.mux(sound.encode(said))
        container.mux(sound.encode())
