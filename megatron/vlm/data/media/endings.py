"""Checks that a sound's container reaches the end it states: FFmpeg takes the end of a file for that of the sound."""

import os
from collections.abc import Callable
from typing import BinaryIO

UNKNOWN = 2_000_000_000
"""RIFF lengths from here on are written by programs that wrote to a pipe and did not know: an hour, the longest sound
that is read, has 1.4e9 bytes in stereo of 32 bits at 48 kHz."""
OGG_PAGE = 27 + 255 + 255**2
"""Bytes of the largest page."""


def missing_end(container: str, file: BinaryIO) -> str:
    """Say how a file is cut; "" if it is complete or its container (FFmpeg's name) does not say where it ends."""
    known = _KNOWN.get(container)
    return known(file, file.seek(0, os.SEEK_END)) if known else ""


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _riff(file: BinaryIO, end: int) -> str:
    return _chunks(int.from_bytes(_read(file, 4, 4), "little"), end)


def _aiff(file: BinaryIO, end: int) -> str:
    return _chunks(int.from_bytes(_read(file, 4, 4), "big"), end)


def _chunks(said: int, end: int) -> str:
    return f"{end} bytes where the file says {said + 8}" if end < said + 8 < UNKNOWN else ""


def _ogg(file: BinaryIO, end: int) -> str:
    """Say how an Ogg file is cut; "" if its last page ends with the file, and is marked as the last."""
    tail = _read(file, max(0, end - OGG_PAGE), OGG_PAGE)
    page = tail[max(0, tail.rfind(b"OggS")) :]
    lengths = page[27 : 27 + page[26]] if len(page) > 27 else b""
    whole = bool(lengths) and len(page) >= 27 + len(lengths) + sum(lengths)
    return "" if whole and page[5] & 4 else "ends before its last page"


def _matroska(file: BinaryIO, end: int) -> str:
    """Say how a file is cut; "" if its segment, behind the header, ends with it, or states no length (all ones)."""
    at = 0
    for element in (b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"):
        head = _read(file, at, 12)
        size = 9 - head[4].bit_length() if len(head) == 12 and head[:4] == element else 9
        if size > 8:
            return ""
        value, ones = int.from_bytes(head[4 : 4 + size], "big") & (1 << 7 * size) - 1, (1 << 7 * size) - 1
        at += 4 + size + value
    return f"{end} bytes where the file says {at}" if value != ones and end < at else ""


_KNOWN: dict[str, Callable[[BinaryIO, int], str]] = {
    "wav": _riff, "aiff": _aiff, "ogg": _ogg, "matroska,webm": _matroska,
}  # fmt: skip
