"""Image files: every damaged kind has its reason, every unusual but whole kind comes out as the right RGB."""

import io
import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from megatron.vlm.data.media.images import image_size, load_rgb, path_below_root
from omnibal_ext.errors import Rejected, UserError


def noise(width: int = 40, height: int = 30) -> Image.Image:
    generator = np.random.default_rng(0)
    return Image.fromarray(generator.integers(0, 255, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that promises `width` x `height` pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def verdict_on(path: Path, decode: bool = False) -> str:
    with pytest.raises(Rejected) as verdict:
        image_size(path, decode=decode)
    assert str(path) in verdict.value.detail
    return verdict.value.reason


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_cut_off_image_is_rejected_unless_all_its_pixels_are_there(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "image"
    whole = encoded(noise(), kind)
    path.write_bytes(whole)
    pixels = load_rgb(path).tobytes()
    rejected = 0
    for size in [*range(1, len(whole) - 40, max(1, len(whole) // 50)), *range(len(whole) - 40, len(whole))]:
        path.write_bytes(whole[:size])
        try:
            image_size(path)
        except Rejected as verdict:
            assert verdict.reason in ("truncated_image", "not_an_image")  # noqa: PT017 - other sizes pass
            rejected += 1
        else:
            assert load_rgb(path).tobytes() == pixels, size
    assert rejected > 50


def test_whole_images_are_judged_without_reading_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("pixels were read")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    for kind in ("JPEG", "WEBP"):
        (tmp_path / kind).write_bytes(encoded(noise(), kind))
        assert image_size(tmp_path / kind) == (40, 30)


def test_a_png_says_by_its_pixels_alone_that_they_are_all_there(tmp_path: Path) -> None:
    """Its structure is whole either way: pixels flipped, or a stream that ends before the last row."""
    whole, path = encoded(noise(), "PNG"), tmp_path / "image.png"
    flipped = bytearray(whole)
    flipped[len(flipped) // 2] ^= 0xFF
    rows = zlib.compress(np.random.default_rng(0).bytes(30 * (1 + 3 * 40)))[:-500]
    short = whole[:33] + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")
    for damaged in (bytes(flipped), short):
        path.write_bytes(damaged)
        assert verdict_on(path) == "truncated_image"
        with pytest.raises(OSError, match=r"truncated|broken|unrecognized"):
            load_rgb(path)


def test_a_file_that_asks_for_another_program_is_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise AssertionError("another program was started")

    monkeypatch.setattr("subprocess.Popen", run)
    path = tmp_path / "image.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\nshowpage\n%%EOF\n")
    assert verdict_on(path) == "not_an_image"
    with pytest.raises(OSError, match="cannot identify"):
        load_rgb(path)


def test_a_jpeg_of_nothing_but_metadata_is_refused_at_once(tmp_path: Path) -> None:
    """Pillow joins the segments of EXIF one by one: 130 MB of them take minutes."""
    plain, path = encoded(noise(), "JPEG"), tmp_path / "image.jpg"
    segment = b"\xff\xe1" + struct.pack(">H", 65_535) + b"Exif\0\0" + bytes(65_527)
    path.write_bytes(plain[:2] + segment * 2000 + plain[2:])
    assert verdict_on(path) == "not_an_image"
    path.write_bytes(plain[:2] + segment * 3 + plain[2:])
    assert image_size(path) == (40, 30)


def test_files_that_cannot_be_opened_have_their_reason(tmp_path: Path) -> None:
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "file").touch()
    for name in ("nowhere.png", "file/below.png"):
        assert verdict_on(tmp_path / name) == "missing_image"
    for name in ("loop.png", "folder.png", "pipe.png", "x" * 300):
        assert verdict_on(tmp_path / name) == "unreadable_image"
    with pytest.raises(UserError, match="no regular file"):
        load_rgb(tmp_path / "pipe.png")


def test_a_reference_stays_below_the_root() -> None:
    for reference in ("/etc/passwd", "../a.png", "a/../../b.png", "a\0.png", ".."):
        with pytest.raises(Rejected, match="path_outside_root"):
            path_below_root(reference)
    for reference, path in (("a.png", "a.png"), ("./a//b/../c.png", "a/c.png"), ("..a", "..a")):
        assert path_below_root(reference) == path


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "secret.png"
    path.write_bytes(encoded(noise(), "PNG"))
    path.chmod(0)
    assert verdict_on(path) == "unreadable_image"


FRAMES = {"save_all": True, "append_images": [noise().rotate(90)]}
WHOLE = {
    "cmyk.jpg": encoded(noise().convert("CMYK"), "JPEG"),
    "palette.png": encoded(noise().convert("P"), "PNG"),
    "transparent_palette.png": encoded(noise().convert("P"), "PNG", transparency=0),
    "alpha.png": encoded(noise().convert("RGBA"), "PNG"),
    "deep.png": encoded(Image.fromarray(np.full((30, 40), 40_000, np.uint16)), "PNG"),
    "really_a_jpeg.png": encoded(noise(), "JPEG"),
    "exif that is damaged.jpg": encoded(noise(), "JPEG", exif=b"Exif\0\0not a TIFF header at all"),
}
FAULTY = {
    "no_bytes.png": ("empty_image", b""),
    "cut.png": ("truncated_image", encoded(noise(), "PNG")[:-400]),
    "cut.jpg": ("truncated_image", encoded(noise(), "JPEG")[:-100]),
    "page.png": ("not_an_image", b"<html>404</html>"),
    "no_pixels.png": ("not_an_image", png_header(0, 8)),
    "huge.png": ("too_many_pixels", png_header(10_000, 10_000)),
    "bomb.png": ("too_many_pixels", png_header(60_000, 60_000)),
    "strip.png": ("too_many_pixels", png_header(1, 89_000_000)),
    "animated.gif": ("animated_image", encoded(noise(), "GIF", **FRAMES)),
    "animated.png": ("animated_image", encoded(noise(), "PNG", **FRAMES)),
    "animated.webp": ("animated_image", encoded(noise(), "WEBP", **FRAMES)),
    "floats.tiff": ("unscaled_pixels", encoded(Image.new("F", (4, 4), 1), "TIFF")),
    "long integers.tiff": ("unscaled_pixels", encoded(Image.new("I", (4, 4), 1), "TIFF")),
}


@pytest.mark.parametrize("name", WHOLE)
def test_unusual_images_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(WHOLE[name])
    assert image_size(tmp_path / name) == load_rgb(tmp_path / name).size == (40, 30)


@pytest.mark.parametrize("name", FAULTY)
def test_every_fault_of_an_image_has_its_reason(tmp_path: Path, name: str) -> None:
    reason, content = FAULTY[name]
    (tmp_path / name).write_bytes(content)
    assert verdict_on(tmp_path / name) == reason


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "WEBP", "PNG"])
def test_a_second_frame_that_is_damaged_is_a_reject_too(tmp_path: Path, kind: str) -> None:
    """Pillow looks for it behind the header, and raises nearly anything."""
    small = noise().resize((4, 3))
    whole, path = encoded(small, kind, save_all=True, append_images=[small.rotate(180)]), tmp_path / "image"
    damaged = [whole[:length] for length in range(1, len(whole))]
    damaged += [whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :] for place in range(len(whole))]
    for content in damaged:
        path.write_bytes(content)
        with suppress(Rejected):
            image_size(path)


def with_orientation(turned: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = turned
    return exif


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("turned", range(1, 9))
def test_an_image_is_read_upright_and_its_size_too(tmp_path: Path, kind: str, turned: int) -> None:
    path = tmp_path / "image"
    path.write_bytes(encoded(noise(), kind, exif=with_orientation(turned)))
    upright = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    assert image_size(path) == image_size(path, decode=True) == upright.size == load_rgb(path).size
    assert upright.size == ((30, 40) if turned >= 5 else (40, 30))
    assert load_rgb(path).tobytes() == upright.tobytes()


def test_the_orientation_of_a_png_is_read_though_it_stands_behind_the_pixels(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    plain, exif = encoded(noise(), "PNG"), with_orientation(6).tobytes()[6:]  # without the prefix JPEG has
    path.write_bytes(plain[:-12] + png_chunk(b"eXIf", exif) + plain[-12:])
    assert image_size(path) == load_rgb(path).size == (30, 40)


def test_sixteen_bits_are_scaled_not_clipped_and_turned_too(tmp_path: Path) -> None:
    values = np.array([[0, 257, 32_896, 65_535], [511, 513, 8192, 65_279]], np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png", exif=with_orientation(6))
    assert image_size(tmp_path / "deep.png") == (2, 4)
    assert np.asarray(load_rgb(tmp_path / "deep.png"))[..., 0].tolist() == np.rot90(values // 257, -1).tolist()
