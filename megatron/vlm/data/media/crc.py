"""Marks by which changes are found: is a file, or what lies in one, still what was preprocessed?

CRC-32 of the stored bytes detects every burst of up to 32 flipped bits, and another file but for one in 2^32. It is no
protection against intent. Computing it takes a small part of the time of decoding. An object in a store has its length
and ETag, which come with any of its bytes.
"""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron.vlm.data.formats.places import open_place
from omnibal_ext.modalities.place import Mark, Place
from omnibal_ext.reading import objects
from omnibal_ext.reading.files import mark_of, open_plain
from omnibal_ext.reading.stores import FIRST, StorePath

BLOCK = 2**20
UNKNOWN = 2**20
"""Bytes that are read ahead of an object whose length is not known."""
LARGEST = 2**32 - 1


class ChangedError(ValueError):
    """A file has another mark than when it was preprocessed."""


def crc_of(path: Path, place: Place = ()) -> Mark:
    """Return the mark of a file, or a place in one. Raises UserError, OSError or ValueError if it cannot be read."""
    with _open(path, place) as file:
        return mark_of(file) or _crc(file)


def begin(path: Path, place: Place, mark: Mark | None, is_kept: bool = False) -> objects.Key | None:
    """Begin to read, if it lies in a store, what `opened` will be asked for; or, of what `is_kept`, `compare`."""
    if not isinstance(path, StorePath) or place[:1] == ("cell",):
        return None
    start, size = map(int, place[1:]) if place else (0, length_of(mark) or UNKNOWN)
    if is_kept and isinstance(mark, str):  # comes with any bytes
        size = min(FIRST, size)
    return objects.begin(path, start, size)


def compare(path: Path, place: Place, mark: Mark | None) -> None:
    """Compare a file, or a place in one, with its mark. Raises as `opened`; of an object reads the first bytes only."""
    begin(path, place, mark, is_kept=True)
    with _open(path, place) as file:
        if mark is not None:
            _compare(path, file, mark)


@contextmanager
def opened(path: Path, place: Place = (), crc: Mark | None = None) -> Iterator[BinaryIO]:
    """Open a file, or a place in one. Raises ChangedError if its mark is not `crc` (None: any)."""
    if crc is not None:
        begin(path, place, crc)
    with _open(path, place) as file:
        if crc is not None:
            _compare(path, file, crc)
            file.seek(0)
        yield file


def _open(path: Path, place: Place) -> BinaryIO:
    return open_place(path, place) if place else open_plain(path, "see to the image")


def length_of(mark: Mark | None) -> int | None:
    """Return how many bytes an object in a store has, by its mark; None: the mark is a CRC-32, or there is none."""
    return int(mark.partition("-")[0]) if isinstance(mark, str) else None


def is_exact(path: Path, mark: Mark | None) -> bool:
    """Return whether a file that passes `opened` has the content that was preprocessed: not where no mark is noted, and
    not that of a copy of an object, of which the length is compared."""
    return isinstance(mark, int) or (mark is not None and isinstance(path, StorePath))


def _compare(path: Path, file: BinaryIO, due: Mark) -> None:
    """Raise ChangedError unless a file has the mark; of one that was copied from a store, its length."""
    if isinstance(due, int):
        found, was = f"CRC-32 {_crc(file):08x}", f"{due:08x}"
    elif mark := mark_of(file):
        found, was = f"length and ETag {mark}", due
    else:
        found, was = f"length {path.stat().st_size}", str(length_of(due))
    if not found.endswith(f" {was}"):
        raise ChangedError(
            f"{path}: is not what was preprocessed: {found}, was {was}; preprocess again, or "
            "take images as they are with --no-image-checksums"
        )


def _crc(file: BinaryIO) -> int:
    """Read by blocks: a file may be larger than memory."""
    crc = 0
    while block := file.read(BLOCK):
        crc = zlib.crc32(block, crc)
    return crc
