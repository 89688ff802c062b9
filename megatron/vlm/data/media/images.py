"""Image files: is this one whole, how large is it, and its pixels as eight-bit RGB.

Only formats that Pillow reads by itself are opened (of EPS it would ask Ghostscript). Checking reads headers where they
tell whether the file is whole: a JPEG must end with its end-of-image marker, a WebP must be as long as it says. A file
that fails this, or is of another format, is decoded in full and Pillow decides: of a PNG only its pixels tell whether
they are all there.

Pixels are those of transformers' processors for the same file: turned upright as EXIF says, alpha dropped, the
transparent colour of a palette white. One thing differs on purpose: 16-bit grey is scaled, which Pillow's own
conversion would clip to white.
"""

import io
import os
import stat
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import ExifTags, Image

from megatron.vlm.data.formats.places import read_place
from megatron.vlm.data.formats.rows import Place
from megatron.vlm.data.media.crc import opened
from megatron.vlm.data.rejects import Rejected


class Normalization(NamedTuple):
    """Mean and deviation of the pixels (red, green, blue, from 0 to 1) that a ViT was trained with."""

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]


NORMALIZATIONS = {
    "imagenet": Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # InternViT
    "clip": Normalization((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),  # LLaVA's ViT
    "half": Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # Qwen3-VL's
    "unit": Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),  # as they are (Gemma 4 without towers)
}

FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
MAX_SIDE = 2**16
MAX_JPEG_HEADER, MAX_JPEG_SEGMENTS = 2**24, 2**12
"""What stands before a JPEG's pixels: of tens of thousands of segments of EXIF Pillow makes one, in minutes."""
MAX_PIXELS = Image.MAX_IMAGE_PIXELS or 2**26  # Pillow's own guard against decompression bombs: 89 megapixels
UPRIGHT = {  # what turns an image upright, by the orientation that EXIF names
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
_NO_RANGE = ("F", "I")  # pixels of which nobody says what is white
_JPEG_END = b"\xff\xd9"
_JPEG_TAIL = 64  # some writers pad the file after the end marker


def path_below_root(reference: str) -> str:
    """An image's path relative to the image root, without detours. Links below the root are the user's own choice.

    Raises `Rejected` (path_outside_root) if the path leads out of the root.
    """
    path = os.path.normpath(reference)
    if "\0" in path or path.startswith("/") or path.split("/", 1)[0] == "..":
        raise Rejected("path_outside_root", f"{reference[:200]!r} leads out of the image root")
    return path


def image_size(path: Path, max_pixels: int = MAX_PIXELS, decode: bool = False, place: Place = ()) -> tuple[int, int]:
    """Width and height in pixels of a usable image, upright. `decode` reads every pixel, which finds flipped bits too.

    With a `place` the image is inside the file `path`.

    Raises `Rejected`: missing_image, unreadable_image, empty_image, not_an_image, truncated_image, too_many_pixels,
    animated_image, unscaled_pixels.
    """
    if place:
        return _size_inside(path, place, max_pixels, decode)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for ever
            raise Rejected("unreadable_image", f"{path}: not a regular file")
        file = path.open("rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Rejected("missing_image", f"{path}: no such file") from error
    except OSError as error:
        raise Rejected("unreadable_image", f"{path}: {error.strerror}") from error
    with file, warnings.catch_warnings():
        if status.st_size == 0:
            raise Rejected("empty_image", f"{path}: zero bytes")
        warnings.simplefilter("ignore")  # what Pillow would warn of either leads to a verdict here or is harmless
        return _checked_size(path, file, max_pixels, decode)


def _size_inside(path: Path, place: Place, max_pixels: int, decode: bool) -> tuple[int, int]:
    try:
        content = read_place(path, place)
    except (ValueError, IndexError) as error:  # of text that is no base64
        raise Rejected("unreadable_image", f"{path}: at {place}: {error}") from error
    if not content:
        raise Rejected("empty_image", f"{path}: zero bytes at {place}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        return _checked_size(path, io.BytesIO(content), max_pixels, decode)


def _checked_size(path: Path, file: BinaryIO, max_pixels: int, decode: bool) -> tuple[int, int]:
    if _jpeg_header_is_endless(file):
        raise Rejected("not_an_image", f"{path}: more than {MAX_JPEG_HEADER} bytes before the pixels; save it again")
    try:
        image: Image.Image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise Rejected("too_many_pixels", f"{path}: {error}") from error
    except Exception as error:  # a broken header makes Pillow's readers raise nearly anything
        raise Rejected("not_an_image", f"{path}: {error}") from error
    width, height = image.size
    if width == 0 or height == 0:
        raise Rejected("empty_image", f"{path}: {width} x {height} pixels")
    if width * height > max_pixels:
        raise Rejected("too_many_pixels", f"{path}: {width} x {height} pixels, limit {max_pixels}; scale it down")
    if max(width, height) > MAX_SIDE:
        raise Rejected("too_many_pixels", f"{path}: {width} x {height} pixels, limit {MAX_SIDE} a side; cut it")
    if getattr(image, "is_animated", False):
        raise Rejected("animated_image", f"{path}: {getattr(image, 'n_frames', 'several')} frames; save the one meant")
    if image.mode in _NO_RANGE:
        raise Rejected(
            "unscaled_pixels", f"{path}: pixels of mode {image.mode}, whose range is unknown; save 8 or 16 bits"
        )
    is_whole = _WHOLE.get(image.format or "")
    if decode or is_whole is None or not is_whole(file):
        image = _decode(path, file)
    width, height = image.size
    return (height, width) if orientation(image) in _SIDEWAYS else (width, height)


def _decode(path: Path, file: BinaryIO) -> Image.Image:
    try:
        file.seek(0)
        image = Image.open(file, formats=FORMATS)
        image.load()
    except Exception as error:  # as above
        raise Rejected("truncated_image", f"{path}: {error}") from error
    return image


def orientation(image: Image.Image) -> int:
    """How the camera was held (EXIF, 1 to 8), as far as the file was read; 1 where it is not said or makes no sense."""
    try:
        # PNG's own getexif would decode the image to see what stands behind its pixels.
        return int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged EXIF says nothing, as in other programs that show images
        return 1


def _jpeg_header_is_endless(file: BinaryIO) -> bool:
    """Whether a JPEG has more before its pixels than any camera writes. The file is left at its start."""
    position, segments, start = 2, 0, file.read(2)
    while start == b"\xff\xd8" and segments <= MAX_JPEG_SEGMENTS and position <= MAX_JPEG_HEADER:
        file.seek(position)
        head = file.read(4)
        if len(head) < 4 or head[0] != 0xFF or head[1] == 0xDA:  # the pixels, or no more segments
            break
        position, segments = position + 2 + max(2, int.from_bytes(head[2:], "big")), segments + 1
    file.seek(0)
    return segments > MAX_JPEG_SEGMENTS or position > MAX_JPEG_HEADER


def _jpeg_is_whole(file: BinaryIO) -> bool:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - _JPEG_TAIL))
    return _JPEG_END in file.read()


def _webp_is_whole(file: BinaryIO) -> bool:
    end = file.seek(0, os.SEEK_END)
    file.seek(4)
    return bool(end >= 8 + struct.unpack("<I", file.read(4))[0])


_WHOLE: dict[str, Callable[[BinaryIO], bool]] = {
    "JPEG": _jpeg_is_whole,
    "WEBP": _webp_is_whole,
}


def load_rgb(path: Path, place: Place = (), crc: int | None = None) -> Image.Image:
    """Decode an image, a file or what is at a `place` in one, as eight-bit RGB, upright.

    Raises what Pillow raises, and ChangedError if the file's CRC-32 is to be another one.
    """
    with opened(path, place, crc) as file, Image.open(file, formats=FORMATS) as image:
        image.load()
        turn = UPRIGHT.get(orientation(image))
        upright = image if turn is None else image.transpose(turn)
        if upright.mode.startswith("I;16"):
            return upright.convert("I").point(lambda value: value / 257).convert("L").convert("RGB")
        rgb = upright.convert("RGB")
        if rgb.info.get("transparency") is None:
            return rgb
        ground = Image.new("RGBA", rgb.size, "white")
        return Image.alpha_composite(ground, rgb.convert("RGBA")).convert("RGB")
