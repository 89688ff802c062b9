"""Image files: is a file complete, its size, and its pixels as 8-bit RGB.

Only formats that Pillow reads without other programs are opened (EPS would start Ghostscript). Where a header tells
whether a file is complete, only headers are checked: a JPEG must have its end-of-image marker, a WebP its stated
length. Files that fail this, and other formats such as PNG, are decoded entirely.

Pixels equal those of transformers' processors: rotated by EXIF, alpha dropped, a palette's transparent colour white.
One difference is intended: 16-bit grey is scaled, where Pillow's conversion would clip it to white.
"""

import os
import struct
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO, NamedTuple

from PIL import ExifTags, Image

from megatron.vlm.data.formats.places import open_place
from megatron.vlm.data.media.crc import opened
from omnibal_ext.errors import Rejected
from omnibal_ext.modalities.place import Mark, Place
from omnibal_ext.reading.files import is_at_hand, open_regular, size_of
from omnibal_ext.reading.memory import MOST_BYTES as MOST_MEMORY
from omnibal_ext.reading.memory import limited_memory

FORMATS = (
    *("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP"),
    *(["AVIF"] if find_spec("PIL.AvifImagePlugin") else []),  # from Pillow 11.3 on
)
SEVERAL_PICTURES = "MPO"
"""A JPEG with further pictures of the same scene behind it, such as one in depth: the first is meant."""
MAX_SIDE = 2**16
MAX_JPEG_HEADER, MAX_JPEG_SEGMENTS = 2**24, 2**12
"""Limits of what comes before a JPEG's pixels: Pillow joins tens of thousands of EXIF segments in minutes."""
MAX_PIXELS = Image.MAX_IMAGE_PIXELS or 2**26  # Pillow's own guard against decompression bombs: 89 megapixels
MOST_BYTES = 2**30  # of a file: the largest image, uncompressed at 16 bits a channel, has 0.7 of it
DECODED_AT_ONCE = 2**20
"""Pixels that take less time than opening the file twice."""
UPRIGHT = {  # EXIF orientation -> the transposition that makes an image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
_NO_RANGE = ("F", "I")  # modes without a defined white
_JPEG_END = b"\xff\xd9"
_JPEG_TAIL = 64  # some writers pad the file after the end marker


def path_below_root(reference: str) -> str:
    """Normalise an image's path relative to the image root. Symbolic links below the root are followed.

    Raises `Rejected` (path_outside_root) if the path leads out of the root.
    """
    path = os.path.normpath(reference)
    if "\0" in path or path.startswith("/") or path.split("/", 1)[0] == "..":
        raise Rejected("path_outside_root", f"{reference[:200]!r} leads out of the image root")
    return path


class Glance(NamedTuple):
    """Size of an image by its header, and whether that shows it to be complete."""

    size: tuple[int, int]  # width and height, upright as far as the header says
    is_whole: bool
    """Whether the file is known to be complete; False: only decoding can tell."""


def image_size(path: Path, max_pixels: int = MAX_PIXELS, decode: bool = False, place: Place = ()) -> tuple[int, int]:
    """Return (width, height) of a usable image, upright. `decode` decodes it entirely, which also finds flipped bits.

    `place`: the image is there inside the file `path`.

    Raises `Rejected`: missing_image, unreadable_image, empty_image, not_an_image, truncated_image, too_many_pixels,
    animated_image, unscaled_pixels.
    """
    return glance(path, max_pixels, decode, place, most_at_once=max_pixels).size


def glance(
    path: Path,
    max_pixels: int = MAX_PIXELS,
    decode: bool = False,
    place: Place = (),
    most_at_once: int = DECODED_AT_ONCE,
) -> Glance:
    """Check an image as `image_size` does, without decoding it if it has more than `most_at_once` pixels."""
    with _open(path, place) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Pillow warns of is checked here or harmless
        return _checked(path, file, max_pixels, decode, most_at_once)


def _open(path: Path, place: Place) -> BinaryIO:
    """Open a file, or a place in one. Raises `Rejected` unless it is there and has at most `MOST_BYTES`."""
    if place:
        try:
            file = open_place(path, place)
        except (OSError, ValueError, IndexError) as error:  # of text that is no base64
            raise Rejected("unreadable_image", f"{path}: at {place}: {error}") from error
        if not size_of(file):
            raise Rejected("empty_image", f"{path}: zero bytes at {place}")
        return file
    try:
        file = open_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Rejected("missing_image", f"{path}: no such file") from error
    except OSError as error:
        raise Rejected("unreadable_image", f"{path}: {error.strerror}") from error
    size = size_of(file)
    if 0 < size <= MOST_BYTES:
        return file
    file.close()
    if size:
        raise Rejected("too_many_pixels", f"{path}: {size} bytes, limit {MOST_BYTES}; scale it down")
    raise Rejected("empty_image", f"{path}: zero bytes")


def _checked(path: Path, file: BinaryIO, max_pixels: int, decode: bool, most_at_once: int) -> Glance:
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
    if _is_animated(path, image):
        raise Rejected("animated_image", f"{path}: several frames; save the one meant")
    if image.mode in _NO_RANGE:
        raise Rejected(
            "unscaled_pixels", f"{path}: pixels of mode {image.mode}, whose range is unknown; save 8 or 16 bits"
        )
    knows_end = _WHOLE.get(image.format or "")
    is_whole = not decode and knows_end is not None and knows_end(file)
    if not is_whole and width * height <= most_at_once:
        image, is_whole = _decode(path, file), True
    width, height = image.size
    return Glance((height, width) if orientation(image) in _SIDEWAYS else (width, height), is_whole)


def _is_animated(path: Path, image: Image.Image) -> bool:
    if image.format == SEVERAL_PICTURES:
        return False
    try:
        return getattr(image, "is_animated", False)  # looks for a second frame, in a GIF or TIFF
    except Exception as error:  # as above
        raise Rejected("truncated_image", f"{path}: {error}") from error


def _decode(path: Path, file: BinaryIO) -> Image.Image:
    try:
        file.seek(0)
        image = Image.open(file, formats=FORMATS)
        # Small images take little, and setting the limit as long as decoding them; TIFFs have tiles of any size.
        is_small = image.width * image.height <= DECODED_AT_ONCE and image.format != "TIFF"
        with nullcontext() if is_small else limited_memory():
            image.load()
    except MemoryError as error:
        raise Rejected(
            "too_many_pixels", f"{path}: decoding it takes more than {MOST_MEMORY} bytes; scale it down"
        ) from error
    except Exception as error:  # as above
        raise Rejected("truncated_image", f"{path}: {error}") from error
    return image


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8, as far as the file was read; 1 if missing or damaged."""
    try:
        # PNG's getexif would decode the image to find EXIF after the pixels.
        return int(Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged EXIF counts as none
        return 1


def _jpeg_header_is_endless(file: BinaryIO) -> bool:
    """Return whether a JPEG has more before its pixels than cameras write. Leaves the file at its start."""
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
    start = max(0, file.seek(0, os.SEEK_END) - _JPEG_TAIL)
    if not is_at_hand(file, start):  # a request for each image: what is cut off shows when it is decoded
        return True
    file.seek(start)
    return _JPEG_END in file.read()


def _webp_is_whole(file: BinaryIO) -> bool:
    end = file.seek(0, os.SEEK_END)
    file.seek(4)
    return bool(end >= 8 + struct.unpack("<I", file.read(4))[0])


_WHOLE: dict[str, Callable[[BinaryIO], bool]] = {"JPEG": _jpeg_is_whole, "WEBP": _webp_is_whole}


def load_rgb(path: Path, place: Place = (), crc: Mark | None = None) -> Image.Image:
    """Decode an image, a file or a `place` in one, as upright 8-bit RGB.

    Raises Pillow's errors, and ChangedError if its mark is not `crc` (None: any).
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
