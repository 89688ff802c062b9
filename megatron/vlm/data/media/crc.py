"""CRC-32 of the stored bytes of a file: is it still what was preprocessed?

It detects every burst of up to 32 flipped bits, and another file but for one in 2^32. It is no protection against
intent. Computing it takes a small part of the time of decoding.
"""

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron.vlm.data.formats.places import read_place
from omnibal_ext.modalities.place import Place
from omnibal_ext.reading.files import open_plain

BLOCK = 2**20
LARGEST = 2**32 - 1


class ChangedError(ValueError):
    """A file has another CRC-32 than when it was preprocessed."""


def crc_of(path: Path, place: Place = ()) -> int:
    """Return the CRC-32 of a file, or a place in one. Raises UserError, OSError or ValueError if it cannot be read."""
    with opened(path, place) as file:
        return _crc(file)


@contextmanager
def opened(path: Path, place: Place = (), crc: int | None = None) -> Iterator[BinaryIO]:
    """Open a file, or a place in one. Raises ChangedError if its CRC-32 is not `crc` (None: any)."""
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
    """Read by blocks: a file may be larger than memory."""
    crc = 0
    while block := file.read(BLOCK):
        crc = zlib.crc32(block, crc)
    return crc
