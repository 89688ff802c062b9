"""Video files: is a file complete, the times of its frames, and frames as patches.

PyAV (the extra `video`) reads files with the results of torchcodec, transformers' reader: frames are the
packets that no edit list discards, the frame rate comes from the packets' times, not from the header, and frames are
rotated as the header says. Checking reads all packets and decodes one frame.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from megatron.vlm.data.media.containers import FILMS, MOST_PACKETS, open_container
from megatron.vlm.data.media.crc import opened
from megatron.vlm.data.media.images import MAX_PIXELS
from omnibal_ext.errors import Rejected, UserError, how_to_install
from omnibal_ext.modalities.place import Mark, Place
from omnibal_ext.modalities.vision.tiling import FRAMES, SQUARE, TiledImage
from omnibal_ext.reading.files import open_regular, size_of
from omnibal_ext.reading.memory import limited_memory

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.filter import Graph
    from av.video.stream import VideoStream

READING = 2
"""Version of how frames are numbered, timed and rotated: datasets record frame numbers, which this gives meaning."""
MOST_FRAMES = 2**24
SHORTEST_SHARE = 0.9
"""A file that states no number of frames must have this share of its stated length."""
FRAMES_LESS = 2
"""Frames that a complete file may lack: edit lists may end inside a frame, the last one's duration may be unknown."""


class VideoFacts(NamedTuple):
    """Size, frames and seconds of a video file, by its packets."""

    size: tuple[int, int]  # width and height in pixels, as it is shown
    frames: int
    seconds: float  # from the start of the first frame to the end of the last one
    has_sound: bool = False

    @property
    def rate(self) -> float:
        """Mean frames a second."""
        return self.frames / self.seconds

    @property
    def times(self) -> list[float]:
        """Seconds of every frame, from the mean rate as transformers' processors compute them."""
        return [frame / self.rate for frame in range(self.frames)]


def require_decoder(why: str) -> None:
    """Raise UserError, "WHY: what to install", if PyAV, which reads video files, is missing or too old."""
    try:
        from av import VideoFrame
    except ImportError as error:
        raise UserError(
            f"{why}: reading videos needs a package that is not installed: {how_to_install('video')}"
        ) from error
    if not hasattr(VideoFrame, "rotation"):
        raise UserError(f"{why}: this PyAV does not say how videos are turned: pip install --upgrade av")


def video_facts(path: Path, place: Place, max_pixels: int) -> VideoFacts:
    """Return size, frames and seconds of a usable video; `place`: it is there inside the file `path`.

    Raises `Rejected`: missing_video, unreadable_video, empty_video, not_a_video, truncated_video, too_many_pixels.
    UserError where PyAV is not installed.
    """
    require_decoder(str(path))
    check_file(path)
    try:
        with opened(path, place) as file, limited_memory(), _container(file, max_pixels) as container:
            scan = _scanned(container, max_pixels)
            missing, has_sound = _missing(scan, container), bool(container.streams.audio)
    except Rejected as verdict:
        raise Rejected(verdict.reason, f"{path}: {verdict.detail}") from verdict
    except Exception as error:  # a broken file makes FFmpeg raise nearly anything
        raise Rejected("not_a_video", f"{path}: {str(error)[:200]}") from error
    (width, height), frames = scan.size, scan.frames
    if missing:
        raise Rejected("truncated_video", f"{path}: {missing}; copy it again")
    if min(width, height) < 1:
        raise Rejected("not_a_video", f"{path}: {frames} frames, none of which can be decoded")
    if width * height > max_pixels or frames > MOST_FRAMES:
        raise Rejected(
            "too_many_pixels", f"{path}: {frames} frames of {width} x {height} pixels, limit {max_pixels} a frame"
        )
    if not scan.end > scan.begin:
        raise Rejected("not_a_video", f"{path}: nothing says when its {frames} frames are shown; encode it again")
    return VideoFacts(scan.size, frames, scan.end - scan.begin, has_sound)


@dataclass(slots=True)
class _Scan:
    """What the packets of a video say; `begin`, `end` and `last` in seconds of its clock."""

    size: tuple[int, int]  # as it is shown
    packets: int = 0
    frames: int = 0
    begin: float = inf
    end: float = -inf
    last: float = -inf
    """End of the last packet; edit lists may show less."""
    heard: float = -inf
    """End of the last audio packet, in seconds; audio may be longer than what is shown."""
    cut: bool = False  # inside the last packet


def _scanned(container: "InputContainer", max_pixels: int) -> _Scan:
    """Read all packets, and decode one frame for its rotation, unless it is larger than `max_pixels`."""
    stream = _video_stream(container)
    width, height = stream.width, stream.height
    scan = _Scan((width, height) if width * height > max_pixels else (0, 0))
    for number, packet in enumerate(container.demux(stream, *container.streams.audio)):
        if number == MOST_PACKETS:
            raise Rejected("too_many_pixels", f"more than {MOST_PACKETS} frames and packets of sound; cut it")
        if packet.stream.index != stream.index:
            ends = ((_start(packet) or 0) + (packet.duration or 0)) * (packet.time_base or 0)
            scan.heard = max(scan.heard, float(ends))
            continue
        if not any(scan.size):
            scan.size = next((_shown_size(frame) for frame in packet.decode()), scan.size)
        if (start := _start(packet)) is None:
            continue
        end = start + (packet.duration or 0)
        scan.packets, scan.last, scan.cut = scan.packets + 1, max(scan.last, end), packet.is_corrupt
        if not packet.is_discard:
            scan.frames, scan.begin, scan.end = scan.frames + 1, min(scan.begin, start), max(scan.end, end)
    base = stream.time_base or Fraction(0)
    scan.begin, scan.end, scan.last = (float(ticks * base) for ticks in (scan.begin, scan.end, scan.last))
    return scan


def _missing(scan: _Scan, container: "InputContainer") -> str:
    """Say how a file is truncated; "" if it is complete."""
    stream = _video_stream(container)
    if scan.cut:
        return f"ends inside frame {scan.packets}"
    if scan.packets < (said := stream.frames):  # edit lists may hide frames
        long = float((stream.duration or 0) * (stream.time_base or 0))
        if not long or scan.last <= long - FRAMES_LESS * (scan.end - scan.begin) / max(scan.frames, 1):
            return f"{scan.packets} frames where the file says {said}"
    first, long = ((ticks or 0) / 1e6 for ticks in (container.start_time, container.duration))
    last = max(scan.last, scan.heard, 0)
    if not said and last < first + SHORTEST_SHARE * long - 1:  # subtitles may be somewhat longer
        return f"ends at {last:g} seconds of {first + long:g}"
    return ""


def check_file(path: Path, what: str = "video") -> None:
    """Raise `Rejected` (missing_video, unreadable_video, empty_video) unless it is a file with bytes."""
    try:
        with open_regular(path) as file:
            size = size_of(file)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Rejected(f"missing_{what}", f"{path}: no such file") from error
    except OSError as error:
        raise Rejected(f"unreadable_{what}", f"{path}: {error.strerror}") from error
    if not size:
        raise Rejected(f"empty_{what}", f"{path}: zero bytes")


def _container(file: BinaryIO, max_pixels: int = MAX_PIXELS) -> AbstractContextManager["InputContainer"]:
    return open_container(file, FILMS, "not_a_video", max_pixels)


def _video_stream(container: "InputContainer") -> "VideoStream":
    """Return the video stream, not an attached picture."""
    from av.video.stream import VideoStream

    stream = container.streams.best("video")
    if not isinstance(stream, VideoStream):
        raise ValueError("has no pictures")
    return stream


def _start(shown: "Packet | VideoFrame") -> int | None:
    """Return the presentation time in ticks, else the decoding time; None: the packet has no frame."""
    return shown.dts if shown.pts is None else shown.pts


def _quarters(frame: "VideoFrame") -> int:
    """Return how often a frame is rotated by 90 degrees, counterclockwise."""
    return round(frame.rotation / 90)


def _shown_size(frame: "VideoFrame") -> tuple[int, int]:
    return (frame.height, frame.width) if _quarters(frame) % 2 else (frame.width, frame.height)


def _numbered_frames(container: "InputContainer") -> "Iterator[tuple[range, VideoFrame]]":
    """Yield every decoded frame and its numbers: a packet whose frame is missing is shown as the next frame."""
    starts: list[int] = []  # heap of packets whose frames were not decoded yet
    number, timed = 0, container.format.name != "avi"  # AVI has frames in order and unreliable times
    for packet in container.demux(_video_stream(container)):
        if (start := _start(packet)) is not None and not packet.is_discard:
            heappush(starts, start)
        for frame in packet.decode():
            first, shown = number, _start(frame) if timed else None
            while starts and (number == first if shown is None else starts[0] <= shown):
                heappop(starts)
                number += 1
            yield range(first, number), frame


def read_frames(
    path: Path, place: Place, numbers: Sequence[int], strict: bool = False, crc: Mark | None = None
) -> Iterator[NDArray[np.uint8]]:
    """Yield the frames of these numbers (from 0, ascending): upright RGB uint8 [height, width, 3].

    `strict`: damage raises an error instead of being concealed by the decoder. Raises FFmpeg's errors, Rejected for a
    container that is not read, ValueError if the video ends too soon, and ChangedError if its mark is not `crc`
    (None: any).
    """
    left = list(numbers)
    graphs: dict[tuple[int, int, str], Graph] = {}
    with opened(path, place, crc) as file, _container(file) as container:
        if strict:
            decoder = _video_stream(container).codec_context
            decoder.options = {**decoder.options, "err_detect": "crccheck+explode"}
        for shown, frame in _numbered_frames(container):
            while left[0] in shown:
                yield _rgb(frame, graphs)
                left.pop(0)
                if not left:
                    return
    raise ValueError(f"ends before frame {left[0]}")


def _rgb(frame: "VideoFrame", graphs: "dict[tuple[int, int, str], Graph]") -> NDArray[np.uint8]:
    """Convert to upright RGB by FFmpeg's filter (PyAV's differs on 10-bit video), kept in `graphs` by size and
    format."""
    import av

    kind = frame.width, frame.height, frame.format.name
    if (graph := graphs.get(kind)) is None:
        graph = graphs[kind] = av.filter.Graph()
        source = graph.add_buffer(None, *kind, time_base=frame.time_base)
        graph.link_nodes(source, graph.add("format", "rgb24"), graph.add("buffersink")).configure()
    graph.push(frame)
    pixels = graph.pull().to_ndarray().astype(np.uint8, copy=False)
    return np.ascontiguousarray(np.rot90(pixels, _quarters(frame)))


def cut_frames(frames: Iterator[NDArray[np.uint8]], plan: TiledImage, patch: int) -> NDArray[np.uint8]:
    """Resize frames (bicubic, in torch as transformers' video processors) and cut them into patches: uint8 [plan.tiles,
    FRAMES, patch, patch, 3]."""
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


def join_tiles(patches: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Concatenate tiles of images and videos; if there are videos, an image's patches repeat as equal frames.

    Row by row in memory, even of one image whose tiles are a view: a broadcast sends the bytes as they lie.
    """
    if any(part.ndim == 5 for part in patches):
        patches = [part if part.ndim == 5 else np.repeat(part[:, None], FRAMES, axis=1) for part in patches]
    return np.ascontiguousarray(np.concatenate(patches))
