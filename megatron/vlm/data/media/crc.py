"""Is an image or a video still what was preprocessed? CRC-32 of its bytes as they are stored.

A flipped bit, or a run of up to 32, always changes it; another file has the same one once in four thousand million. Who
wants to deceive can, as by changing the dataset. Reading it takes a small part of what decoding takes.
"""

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron.vlm.data.formats.places import read_place
from megatron.vlm.data.formats.rows import Place
from omnibal_ext.reading.files import open_plain

BLOCK = 2**20
LARGEST = 2**32 - 1


class ChangedError(ValueError):
    """A file is not the one that was preprocessed."""


def crc_of(path: Path, place: Place = ()) -> int:
    """Of a file, or of what is at a place in one. Raises UserError, OSError or ValueError if it cannot be read."""
    with opened(path, place) as file:
        return _crc(file)


@contextmanager
def opened(path: Path, place: Place = (), crc: int | None = None) -> Iterator[BinaryIO]:
    """A file, or what is at a place in one; raises ChangedError if its CRC-32 is to be another one."""
    with io.BytesIO(read_place(path, place)) if place else open_plain(path, "see to the image") as file:
        if crc is not None:
            found = _crc(file)
            if found != crc:
                raise ChangedError(
                    f"{path}: is not what was preprocessed: CRC-32 {found:08x}, was {crc:08x}; preprocess again, or "
                    "take images as they are with --no-image-checksums"
                )
            file.seek(0)
        yield file


def _crc(file: BinaryIO) -> int:
    """Block by block: a file may be larger than memory."""
    crc = 0
    while block := file.read(BLOCK):
        crc = zlib.crc32(block, crc)
    return crc
