"""Objects of a store as files: by ranges, as they are asked for, or whole and ahead of use, several at once."""

import errno
import io
import os
from typing import TYPE_CHECKING, Any

from omnibal_ext.reading.stores import (
    FIRST,
    MOST_A_REQUEST,
    Range,
    StorePath,
    answer,
    begin_range,
    head,
    read_range,
)

if TYPE_CHECKING:
    from concurrent.futures import Future

WHOLE = 2**26
"""Objects of more bytes are read by ranges where they are used, not ahead."""
MOST_AHEAD = 2**28
"""Bytes that a process has begun to read and not yet used."""


class ObjectFile(io.RawIOBase):
    """An object, or `size` bytes of it from `start` on; reads on in order cost ever fewer requests."""

    def __init__(self, path: StorePath, start: int = 0, size: int | None = None) -> None:
        """Read the first bytes. Raises OSError, StoreError."""
        first = _taken(path, start) or head(path, start)
        self.path, self.start, self.mark, self.total = path, start, first.mark, first.total
        self.size = first.total - start if size is None else max(0, min(size, first.total - start))
        self._at, self._step = 0, FIRST
        self._block, self._block_at = memoryview(first.content), 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that it can be read from anywhere."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the byte that is next."""
        self._at = max(0, offset + (0, self._at, self.size)[whence])
        return self._at

    def tell(self) -> int:
        """Return the byte that is next."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read as many bytes as are at hand or come with one request."""
        wanted = min(len(buffer), self.size - self._at)
        if wanted <= 0:
            return 0
        behind = self._at - self._block_at
        if not 0 <= behind < len(self._block):
            self._fetch(wanted, goes_on=0 <= behind - len(self._block) < self._step)
            behind = 0
        found = self._block[behind : behind + wanted]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def is_at_hand(self, start: int) -> bool:
        """Return whether the bytes from `start` to the end cost no request."""
        return start >= self._block_at and self.size <= self._block_at + len(self._block)

    def _fetch(self, wanted: int, goes_on: bool) -> None:
        self._step = min(2 * self._step, MOST_A_REQUEST) if goes_on else FIRST
        size = min(max(wanted, self._step), MOST_A_REQUEST, self.size - self._at)
        found = read_range(self.path, self.start + self._at, size)
        refuse_other(self.path, found.mark, self.mark)
        self._block, self._block_at = memoryview(found.content), self._at


def refuse_other(path: StorePath, found: str, due: str) -> None:
    """Raise OSError if parts of an object are of two versions."""
    if found != due:
        raise OSError(errno.ESTALE, f"changed while it was read (length and ETag {found}, were {due})", str(path))


Key = tuple[StorePath, int]
_begun: "dict[Key, tuple[list[Future[Range]], int]]" = {}
"""Requests for what begins at a byte of an object, and their bytes."""
os.register_at_fork(after_in_child=_begun.clear)  # nobody there would end these requests


def begin(path: StorePath, start: int, size: int) -> Key | None:
    """Begin to read bytes for the next `ObjectFile` that starts there; return None if they are being read already, or
    are too many to be read ahead."""
    key = (path, start)
    if key in _begun or not 0 < size <= WHOLE or in_flight() + size > MOST_AHEAD:
        return None
    steps = range(start, start + size, MOST_A_REQUEST)
    _begun[key] = [begin_range(path, at, min(MOST_A_REQUEST, start + size - at)) for at in steps], size
    return key


def forget(key: Key) -> None:
    """Drop what was begun and not used."""
    for one in _begun.pop(key, ([], 0))[0]:
        one.cancel()


def in_flight() -> int:
    """Return the bytes that were begun and not used."""
    return sum(size for _, size in _begun.values())


def _taken(path: StorePath, start: int) -> Range | None:
    """Return what was begun, now whole. Raises OSError, StoreError."""
    if (found := _begun.pop((path, start), None)) is None:
        return None
    parts = [answer(path, one) for one in found[0]]
    for part in parts:
        refuse_other(path, part.mark, parts[0].mark)
    return parts[0]._replace(content=b"".join(part.content for part in parts))
