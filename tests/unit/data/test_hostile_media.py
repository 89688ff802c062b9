"""What a stranger calls an image, a film or a sound opens no other file, and costs what the file is worth."""

import io
import os
import resource
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.demo.data import train_tokenizer
from megatron.vlm.data.formats.rows import Row
from megatron.vlm.data.media import containers, images, sounds, videos
from megatron.vlm.data.media.images import image_size
from megatron.vlm.data.media.sounds import load_sound, sound_length
from megatron.vlm.data.media.videos import read_frames, video_facts
from megatron.vlm.preprocessing.samples import SampleMaker
from omnibal_ext.errors import Rejected
from omnibal_ext.modalities.modality import VISION
from omnibal_ext.reading.memory import limited_memory
from tests.demo import demo_recipe, turns
from tests.unit.data.clips import noise, write_video
from tests.unit.data.noises import chirp, encoded

ANY = 10**9


def reason(work: Any, *words: Any) -> str:
    with pytest.raises(Rejected) as verdict:
        work(*words)
    return verdict.value.reason


SDP = (
    "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=video {} RTP/AVP 96\r\n"
    "a=rtpmap:96 H264/90000\r\n"
)
LISTS = {
    "concat": "ffconcat version 1.0\nfile private.mp4\n",
    "sdp": SDP.format(0),
    "hls": "#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10.0,\nprivate.mp4\n#EXT-X-ENDLIST\n",
    "subtitles": "1\n00:00:00,000 --> 00:00:09,000\nHello\n",
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_other_files_and_addresses_are_no_films(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("av")
    monkeypatch.chdir(tmp_path)
    write_video(tmp_path / "private.mp4", noise(6, 32, 24), 3)
    (tmp_path / "film.mp4").write_text(LISTS[name])
    assert reason(video_facts, tmp_path / "film.mp4", (), ANY) == "not_a_video"
    assert reason(sound_length, tmp_path / "film.mp4", (), 16000) == "not_audio"
    with pytest.raises((Rejected, ValueError)):
        list(read_frames(tmp_path / "film.mp4", (), [0]))


@pytest.mark.parametrize(
    ("name", "codec"),
    [("a.mp4", "mpeg4"), ("a.mov", "mpeg4"), ("a.mkv", "mpeg4"), ("a.webm", "libvpx"), ("a.avi", "mpeg4"),
     ("a.ts", "mpeg4"), ("a.flv", "flv"), ("a.wmv", "wmv2"), ("a.mpg", "mpeg1video"), ("a.ogv", "libtheora")],
)  # fmt: skip
def test_containers_of_the_list_are_read(name: str, codec: str, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    if codec not in av.codecs_available:
        pytest.skip(f"no encoder {codec}")
    with av.open(tmp_path / name, "w") as container:
        stream: Any = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for frame in noise(25, 48, 32):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    facts = video_facts(tmp_path / name, (), ANY)
    assert facts.size == (48, 32)
    assert facts.frames in (24, 25)
    assert len(list(read_frames(tmp_path / name, (), [0, 20]))) == 2


def test_frames_that_are_larger_than_their_header_says_are_not_decoded(tmp_path: Path) -> None:
    """A decoder takes memory for the size that the stream says, whatever the container does."""
    pytest.importorskip("av")
    write_video(tmp_path / "a.mkv", noise(3, 640, 480), 3)
    content = (tmp_path / "a.mkv").read_bytes()
    for element, size in ((b"\xb0\x82", 640), (b"\xba\x82", 480)):
        content = content.replace(element + struct.pack(">H", size), element + struct.pack(">H", 16), 1)
    (tmp_path / "a.mkv").write_bytes(content)
    with (
        (tmp_path / "a.mkv").open("rb") as file,
        containers.open_container(file, containers.FILMS, "not_a_video", 640 * 480 - 1) as container,
        pytest.raises(Exception, match=r"max_pixels|nvalid"),
    ):
        list(container.decode(video=0))


def test_packets_and_samples_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    write_video(tmp_path / "a.mp4", noise(9, 32, 24), 3)
    (tmp_path / "a.mp3").write_bytes(encoded(chirp(9000, 16000, 2), 16000, "libmp3lame", "mp3"))
    (tmp_path / "a.flac").write_bytes(encoded(chirp(9000, 16000, 2), 16000, "flac", "flac"))
    monkeypatch.setattr(sounds, "MOST_SAMPLES", 17_990)
    assert reason(sound_length, tmp_path / "a.flac", (), 16000) == "too_long_audio"
    assert reason(load_sound, tmp_path / "a.flac", (), 16000) == "too_long_audio"
    monkeypatch.setattr(sounds, "MOST_SAMPLES", 18_000)
    assert sound_length(tmp_path / "a.flac", (), 16000) == 9000
    for module in (videos, sounds):
        monkeypatch.setattr(module, "MOST_PACKETS", 5)
    assert reason(video_facts, tmp_path / "a.mp4", (), ANY) == "too_many_pixels"
    assert reason(sound_length, tmp_path / "a.mp3", (), 16000) == "too_long_audio"


def test_a_sound_resampled_in_blocks_is_that_resampled_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av")
    soxr = pytest.importorskip("soxr")
    (tmp_path / "a.wav").write_bytes(encoded(chirp(30_007, 44100), 44100, "pcm_f32le", "wav"))
    own = load_sound(tmp_path / "a.wav", (), 44100)
    monkeypatch.setattr(sounds, "BLOCK", 4096)
    once = soxr.resample(own, 44100, 16000, quality="soxr_hq")
    found = load_sound(tmp_path / "a.wav", (), 16000)
    np.testing.assert_array_equal(found[: len(once)], once[: len(found)])
    assert len(found) == -(-30_007 * 16000 // 44100)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def turned_at_its_end(width: int, height: int) -> bytes:
    """A PNG that says behind its pixels that it is to be turned by 90 degrees."""
    out, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise(1, width, height)[0]).save(out, "PNG")
    end = chunk(b"IEND", b"")
    return out.getvalue().removesuffix(end) + chunk(b"eXIf", exif.tobytes()[6:]) + end


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer())
    return tmp_path


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file is decoded; all images are large."""
    counts, decode = Counter[str](), images._decode

    def count(path: Path, file: Any) -> Any:
        counts[path.name] += 1
        return decode(path, file)

    monkeypatch.setattr(images, "_decode", count)
    monkeypatch.setattr(images.glance, "__defaults__", (*(images.glance.__defaults__ or ())[:-1], 100))
    return counts


def asked(*names: str) -> Row:
    record: dict[str, Any] = {"images": list(names), "conversations": turns("<image>" * len(names) + "What?", "A cat.")}
    return Row(1, record)


def test_large_images_are_decoded_once_a_line_and_only_where_it_is_not_too_long(
    root: Path, decoded: Counter[str]
) -> None:
    Image.fromarray(noise(1, 64, 32)[0]).save(root / "large.png")
    maker = SampleMaker(demo_recipe(root, max_tiles=4))
    sample = maker.make(asked(*["large.png"] * 5))
    assert len(sample.items[VISION]) == 5
    assert decoded == {"large.png": 1}
    short = SampleMaker(demo_recipe(root, max_tiles=4, max_tokens=3))
    assert reason(short.make, asked("large.png")) == "too_many_tokens"
    assert decoded == {"large.png": 1}


def test_an_image_that_is_turned_behind_its_pixels_is_cut_as_it_is_shown(root: Path, decoded: Counter[str]) -> None:
    (root / "turned.png").write_bytes(turned_at_its_end(96, 32))
    Image.fromarray(noise(1, 32, 96)[0]).save(root / "upright.png")
    maker = SampleMaker(demo_recipe(root, max_tiles=4))
    turned, upright = (maker.make(asked(f"{name}.png")).items[VISION][0] for name in ("turned", "upright"))
    assert (turned.columns, turned.rows) == (upright.columns, upright.rows)
    assert turned.rows > turned.columns
    assert image_size(root / "turned.png") == (32, 96)


def test_a_large_image_that_is_cut_is_rejected(root: Path, decoded: Counter[str]) -> None:
    Image.fromarray(noise(1, 64, 32)[0]).save(root / "cut.png")
    whole = (root / "cut.png").read_bytes()
    (root / "cut.png").write_bytes(whole[: len(whole) // 2])
    assert reason(SampleMaker(demo_recipe(root)).make, asked("cut.png")) == "truncated_image"


def test_an_image_file_has_a_limit_and_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    assert reason(image_size, tmp_path / "pipe.png") == "unreadable_image"
    assert reason(image_size, Path("/dev/zero")) == "unreadable_image"
    (tmp_path / "a.png").write_bytes(turned_at_its_end(32, 32))
    monkeypatch.setattr(images, "MOST_BYTES", (tmp_path / "a.png").stat().st_size)
    assert image_size(tmp_path / "a.png") == (32, 32)
    monkeypatch.setattr(images, "MOST_BYTES", (tmp_path / "a.png").stat().st_size - 1)
    assert reason(image_size, tmp_path / "a.png") == "too_many_pixels"


def test_memory_is_limited_inside_and_free_behind() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with limited_memory(2**26), pytest.raises(MemoryError):
        bytearray(2**28)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    bytearray(2**28)
