"""Films as people have them: of many rates, turned, cut by edit lists, without what headers should say."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.data.clips import noise

TICKS = 1000
"""A second has so many."""


@dataclass(frozen=True)
class MadeFilm:
    """A film that is written, and then changed."""

    name: str  # of its file
    codec: str = "libx264"
    times: tuple[int, ...] = tuple(range(0, 4000, 100))
    """Milliseconds of its frames."""
    says: int = 25
    """Frames a second, in the header."""
    size: tuple[int, int] = (96, 64)
    bframes: int = 0
    turned: int = 0
    """Degrees."""
    pixels: str = "yuv420p"
    colours: tuple[int, int] = (2, 1)
    """Matrix and range, as FFmpeg numbers them; 2: not said."""
    edits: tuple[tuple[int, int], ...] = ()
    """Of an edit list: milliseconds, and where they begin; -1: nothing is shown."""
    shift: int = 0
    """Milliseconds by which its packets are moved; -1000: the first second is cut away."""
    mux: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Elements of a Matroska file, see VOID."""


VOID = {"rate": b"\x23\xe3\x83\x84", "length": b"\x44\x89\x88"}
"""How Matroska begins the time of a frame, and the length of all."""


def write_film(folder: Path, film: MadeFilm) -> Path:
    path = folder / film.name
    _encode(path, film)
    if film.shift:
        _move(path, film)
    if film.edits:
        path.write_bytes(with_edits(path.read_bytes(), film.edits))
    for what in film.without:
        path.write_bytes(_without(path.read_bytes(), VOID[what]))
    return path


def _encode(path: Path, film: MadeFilm) -> None:
    import av

    frames = passing(len(film.times), *film.size)
    with av.open(path, "w", options=film.mux) as container:
        stream: Any = container.add_stream(film.codec, rate=film.says)
        stream.width, stream.height = film.size
        stream.pix_fmt = "yuvj420p" if film.codec == "mjpeg" else film.pixels
        stream.codec_context.time_base = Fraction(1, film.says if film.name.endswith(".avi") else TICKS)
        stream.codec_context.gop_size = 12
        stream.codec_context.max_b_frames = film.bframes
        stream.codec_context.colorspace = film.colours[0]
        stream.codec_context.color_range = 2 if film.codec == "mjpeg" else film.colours[1]
        if film.turned:
            stream.set_display_rotation(film.turned)
        ticks = 1 / stream.codec_context.time_base
        if film.codec == "libx264":
            stream.codec_context.options = {"b-adapt": "0", "sc_threshold": "0"}
        for pixels, milliseconds in zip(frames, film.times, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = round(milliseconds * ticks / 1000)
            frame.time_base = 1 / ticks
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _move(path: Path, film: MadeFilm) -> None:
    """Write the packets anew at other times; what is before 0 is cut away by an edit list, which MP4 has."""
    import av

    moved = path.with_stem(path.stem + "-moved")
    with av.open(path) as read, av.open(moved, "w", options=film.mux) as written:
        source = read.streams.video[0]
        stream = written.add_stream_from_template(source)
        for packet in read.demux(source):
            if packet.dts is None:
                continue
            shift = round(film.shift / 1000 / packet.time_base)
            packet.pts, packet.dts, packet.stream = packet.pts + shift, packet.dts + shift, stream
            written.mux(packet)
    moved.replace(path)


def with_edits(content: bytes, edits: Sequence[tuple[int, int]]) -> bytes:
    """An MP4 of one stream with its moov at the end, and another edit list."""
    moov = content.rindex(b"moov") - 4
    media = _field(content, b"mdhd", 12)  # ticks a second
    overall = _field(content, b"mvhd", 12)
    first = _field(content, b"elst", 12) if b"elst" in content else 0  # where the whole film begins
    rows = b"".join(
        struct.pack(">iii", long * overall // 1000, begin if begin < 0 else first + begin * media // 1000, 1 << 16)
        for long, begin in edits
    )
    table = _box(b"edts", _box(b"elst", struct.pack(">ii", 0, len(edits)) + rows))
    inside = content[moov + 8 :]
    trak = inside.index(b"trak") - 4
    size = struct.unpack(">i", inside[trak : trak + 4])[0]
    boxes = inside[trak + 8 : trak + size]
    if b"edts" in boxes:
        old = boxes.index(b"edts") - 4
        boxes = boxes[:old] + boxes[old + struct.unpack(">i", boxes[old : old + 4])[0] :]
    at = boxes.index(b"mdia") - 4
    inside = inside[:trak] + _box(b"trak", boxes[:at] + table + boxes[at:]) + inside[trak + size :]
    return content[:moov] + _box(b"moov", inside)


def _field(content: bytes, box: bytes, offset: int) -> int:
    at = content.index(box) + 4 + offset
    return int(struct.unpack(">i", content[at : at + 4])[0])


def _box(name: bytes, inside: bytes) -> bytes:
    return struct.pack(">i", 8 + len(inside)) + name + inside


def _without(content: bytes, element: bytes) -> bytes:
    """A Matroska file in which an element is a hole."""
    at = content.index(element)
    size = len(element) + (element[-1] & 0x7F)
    return content[:at] + bytes([0xEC, 0x80 | size - 2]) + bytes(size - 2) + content[at + size :]


def passing(frames: int, width: int, height: int) -> np.ndarray:
    """uint8 [frames, height, width, 3]: all moves to the left, a pixel a frame, behind a red upper left corner."""
    picture = noise(1, width + frames, height)[0]
    film = np.stack([picture[:, frame : frame + width] for frame in range(frames)])
    film[:, :16, :16] = (255, 0, 0)
    return film


def even(frames: int, rate: float) -> tuple[int, ...]:
    return tuple(int(number) for number in np.rint(np.arange(frames) * 1000 / rate))


def uneven(frames: int, seed: int, longest: int = 500) -> tuple[int, ...]:
    gaps = np.random.default_rng(seed).integers(40, longest, frames)
    return tuple(int(number) for number in np.cumsum(gaps) - gaps[0])


EDITS: list[dict[str, Any]] = [
    {"shift": -1550}, {"shift": -1550, "mux": {"movflags": "faststart"}}, {"edits": ((1500, 0),)},
    {"edits": ((1250, 1333),)}, {"edits": ((800, 300), (700, 2000))}, {"edits": ((500, -1), (1000, 1000))},
    {"edits": ((800, 2000), (800, 300))},
]  # fmt: skip
LIVE, PIECES = {"live": "1"}, {"movflags": "frag_keyframe+empty_moov"}
FILMS = [
    *(MadeFilm(f"rate-{rate}.{kind}", codec, even(30, rate), says)
      for rate, says in ((0.5, 30), (10, 10), (23.976, 24), (29.97, 1000), (119.88, 60))
      for kind, codec in (("mp4", "libx264"), ("mkv", "mpeg4"), ("webm", "libvpx-vp9"))),
    *(MadeFilm(f"rate-{rate}-{codec}.avi", codec, even(20, rate), rate)
      for rate, codec in ((1, "mjpeg"), (5, "mpeg4"), (24, "ffv1"))),
    *(MadeFilm(f"uneven-{seed}.{kind}", codec, uneven(25, seed), says)
      for seed, says in enumerate((25, 1000, 90, 15))
      for kind, codec in (("mp4", "libx264"), ("mkv", "libx264"), ("webm", "libvpx"))),
    MadeFilm("gaps.avi", "mpeg4", uneven(25, 5)), MadeFilm("gaps-mjpeg.avi", "mjpeg", uneven(9, 6)),
    *(MadeFilm(f"turned-{turned}-{codec}.{kind}", codec, even(12, 8), turned=turned)
      for turned in (90, 180, 270) for kind, codec in (("mp4", "libx264"), ("mp4", "mpeg4"), ("mkv", "libx264"))),
    *(MadeFilm(f"cut-{number}-{b}.mp4", bframes=b, **edit) for number, edit in enumerate(EDITS) for b in (0, 3)),
    MadeFilm("cut-uneven.mp4", times=uneven(30, 8, 200), shift=-1550),
    MadeFilm("cut-turned.mp4", turned=90, bframes=2, edits=((1250, 1333),)),
    # B-frames, whose packets come in another order than they are shown.
    *(MadeFilm(f"between-{codec}.{kind}", codec, even(30, 25), bframes=3) for kind, codec in (
        ("mp4", "libx264"), ("mp4", "mpeg4"), ("mkv", "libx265"), ("avi", "mpeg4"), ("avi", "libx264"))),
    # Files that were written while somebody watched, and lack what is known at the end only.
    MadeFilm("live.webm", "libvpx-vp9", says=1000, mux=LIVE),
    MadeFilm("live.mkv", times=uneven(30, 7), says=1000, mux=LIVE), MadeFilm("no-rate.mkv", without=("rate",)),
    MadeFilm("no-rate.webm", "libvpx", uneven(30, 9), without=("rate",)),
    MadeFilm("no-length.webm", "libvpx-vp9", without=("length",)),
    MadeFilm("nothing.mkv", bframes=2, without=("rate", "length")), MadeFilm("pieces.mp4", mux=PIECES),
    MadeFilm("pieces-between.mp4", times=uneven(30, 3), bframes=3, mux=PIECES),
    # Of other pixels, and sizes that are odd.
    MadeFilm("colours-709.mp4", colours=(1, 1)), MadeFilm("colours-601.mp4", colours=(6, 1)),
    MadeFilm("colours-full.mp4", colours=(1, 2)), MadeFilm("colours-444.mkv", pixels="yuv444p"),
    MadeFilm("colours-10.mkv", "libx265", pixels="yuv420p10le", colours=(9, 1)),
    MadeFilm("colours-grey.mkv", "ffv1", pixels="gray"), MadeFilm("colours-rgb.mkv", "ffv1", pixels="bgr0"),
    MadeFilm("odd.mkv", "ffv1", size=(97, 61)), MadeFilm("odd-turned.mp4", "mpeg4", size=(98, 62), turned=90),
]  # fmt: skip
