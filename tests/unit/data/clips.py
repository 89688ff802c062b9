"""Short videos, as files and as frames, and words about them."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TURNS = [{"from": "human", "value": "<video>\nWhat happens?"}, {"from": "gpt", "value": "A cat jumps."}]

OF_IMAGE = {"image": "b.png", "conversations": [{"from": "human", "value": "<image>What?"}, TURNS[1]]}
OF_WORDS = {"conversations": [{"from": "human", "value": "Hi"}, TURNS[1]]}


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


def roles_of_omni(markup: str) -> dict[str, str]:
    """The tokens of a thinker by the names that its processor asks for."""
    older = markup == "qwen2.5-omni"
    kinds, begin, end = ("image", "video", "audio"), *(("bos", "eos") if older else ("start", "end"))
    roles = {f"{kind}_token": f"<|{kind.upper()}|>" if older else f"<|{kind}_pad|>" for kind in kinds}
    for kind in ("vision", "audio"):
        roles |= {f"{kind}_bos_token": f"<|{kind}_{begin}|>", f"{kind}_eos_token": f"<|{kind}_{end}|>"}
    return roles


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
