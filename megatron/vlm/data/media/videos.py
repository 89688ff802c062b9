"""Video files: is this one whole, when are its frames, and its frames as patches.

Files are read by PyAV, as `pip install 'omnibal[video]'` brings it. Checking reads the container to its end without
decoding: a file that ends too soon has fewer frames than it says. Frames are counted as transformers counts them, and
are as far apart as the mean rate that the file names. They are not turned: what a phone notes of how it was held is
passed over, as transformers' reader does.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from megatron.vlm.data.formats.rows import Place
from megatron.vlm.data.media.crc import opened
from megatron.vlm.data.media.tiles import FRAMES, SQUARE, TiledImage
from megatron.vlm.data.rejects import Rejected
from omnibal_ext.errors import UserError

if TYPE_CHECKING:
    from av.container import InputContainer

MOST_FRAMES = 2**24
SHORTEST_SHARE = 0.9
"""Of the length that a file says, where it does not say how many frames it has."""


class VideoFacts(NamedTuple):
    """What a video file says of itself."""

    size: tuple[int, int]  # width and height in pixels
    frames: int
    rate: float  # frames a second

    @property
    def times(self) -> list[float]:
        """Seconds of every frame."""
        return [frame / self.rate for frame in range(self.frames)]


def require_decoder(why: str) -> None:
    """Raise UserError naming what to install where video files cannot be read."""
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"{why}: reading videos needs a package that is not installed: pip install 'omnibal[video]'"
        ) from error


def video_facts(path: Path, place: Place, max_pixels: int) -> VideoFacts:
    """Size, frames and rate of a usable video; with a `place` it is inside the file `path`.

    Raises `Rejected`: missing_video, unreadable_video, empty_video, not_a_video, truncated_video, too_many_pixels.
    UserError where PyAV is not installed.
    """
    require_decoder(str(path))
    import av

    _check_file(path)
    try:
        with _opened(path, place) as container:
            stream = container.streams.video[0]
            size, rate, said = (stream.width, stream.height), float(stream.average_rate or 0), stream.frames
            times = [packet.pts or 0 for packet in container.demux(stream) if packet.size]
            there, last = len(times), float(max(times, default=0) * (stream.time_base or 0))
            long = (container.duration or 0) / av.time_base
    except Exception as error:  # a broken file makes FFmpeg raise nearly anything
        raise Rejected("not_a_video", f"{path}: {str(error)[:200]}") from error
    if not rate > 0 or min(size) < 1:
        raise Rejected("not_a_video", f"{path}: {size[0]} x {size[1]} pixels, {rate} frames a second")
    if there < said:
        raise Rejected("truncated_video", f"{path}: {there} frames where the file says {said}; copy it again")
    if not said and last < SHORTEST_SHARE * long - 1:  # sound may be somewhat longer
        raise Rejected("truncated_video", f"{path}: ends at {last:g} seconds of {long:g}; copy it again")
    if size[0] * size[1] > max_pixels or there > MOST_FRAMES:
        raise Rejected(
            "too_many_pixels", f"{path}: {there} frames of {size[0]} x {size[1]} pixels, limit {max_pixels} a frame"
        )
    return VideoFacts(size, said or there, rate)


def _check_file(path: Path) -> None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Rejected("missing_video", f"{path}: no such file") from error
    except OSError as error:
        raise Rejected("unreadable_video", f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode) or not os.access(path, os.R_OK):  # opening a named pipe would wait for ever
        raise Rejected("unreadable_video", f"{path}: not a regular file that may be read")
    if status.st_size == 0:
        raise Rejected("empty_video", f"{path}: zero bytes")


@contextmanager
def _opened(path: Path, place: Place, crc: int | None = None) -> "Iterator[InputContainer]":
    import av

    # A file object has no name from which FFmpeg would go on to other files or the network.
    with opened(path, place, crc) as file, av.open(file) as container:
        yield container


def read_frames(
    path: Path, place: Place, numbers: Sequence[int], strict: bool = False, crc: int | None = None
) -> Iterator[NDArray[np.uint8]]:
    """The frames of these numbers, counted from 0, in order: RGB uint8 [height, width, 3].

    Decoders conceal what damage they can, unless `strict`. Raises what FFmpeg raises, ValueError if the video ends
    before, and ChangedError if the file's CRC-32 is to be another one.
    """
    left = list(numbers)
    with _opened(path, place, crc) as container:
        if strict:
            container.streams.video[0].codec_context.options = {"err_detect": "crccheck+explode"}
        for number, frame in enumerate(container.decode(video=0)):
            if number == left[0]:
                yield frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
                left.pop(0)
            if not left:
                return
    raise ValueError(f"ends before frame {left[0]}")


def cut_frames(frames: Iterator[NDArray[np.uint8]], plan: TiledImage, patch: int) -> NDArray[np.uint8]:
    """Resize (bicubic) and cut frames as patches: uint8 [plan.tiles, FRAMES, patch, patch, 3].

    Pixels are those of transformers' video processors, which resize with torch, not with Pillow: one in a hundred
    is another.
    """
    size = (plan.rows * patch, plan.columns * patch)
    film = np.stack([_resized(frame, size) for frame in frames])
    if missing := -len(film) % FRAMES:
        film = np.concatenate([film, film[-1:].repeat(missing, axis=0)])
    down, across = plan.rows // SQUARE, plan.columns // SQUARE
    cells = film.reshape(-1, FRAMES, down, SQUARE, patch, across, SQUARE, patch, 3)
    return cells.transpose(0, 2, 5, 3, 6, 1, 4, 7, 8).reshape(-1, FRAMES, patch, patch, 3)


def _resized(frame: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    if frame.shape[:2] == size:
        return frame
    picture = torch.tensor(frame).permute(2, 0, 1)[None].contiguous()
    out = interpolate(picture, size=size, mode="bicubic", align_corners=False, antialias=True)
    return out[0].permute(1, 2, 0).numpy()


def as_films(patches: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Patches of several images end to end; an image's frames are equal ones where others have several."""
    if all(part.ndim == 4 for part in patches):
        return np.concatenate(patches)
    return np.concatenate([part if part.ndim == 5 else np.repeat(part[:, None], FRAMES, axis=1) for part in patches])
