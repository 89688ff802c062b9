"""The members of a tar, read header by header: nothing is unpacked, and no header costs more than its bytes.

(Python's `tarfile` decodes single headers here. Its own loop goes backwards where a size is below zero, calls itself
for every long name, takes a bad header and a cut-off end for the end, and searches extended headers in quadratic time.)
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import shown

BLOCK = tarfile.BLOCKSIZE
MOST_HEADER = 2**20
"""Bytes of an extended header: names and numbers."""
_CHUNK = 2**20
_SPARSE = "GNU.sparse."


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a tar: `size` bytes from `start`; its headers begin at `offset`."""

    name: str
    offset: int
    start: int
    size: int
    kind: bytes
    """Type, as a constant of `tarfile`."""
    target: str
    """Path to which a link leads; "" for others."""

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file, with content."""
        return self.kind in tarfile.REGULAR_TYPES

    @property
    def end(self) -> int:
        """The byte at which the next header is due."""
        return self.start + -(-self.size // BLOCK) * BLOCK if self.has_blocks else self.start

    @property
    def has_blocks(self) -> bool:
        """Whether blocks of content follow the header."""
        return self.is_file or self.kind not in tarfile.SUPPORTED_TYPES


def members(file: BinaryIO, size: int, start: int = 0) -> Iterator[Member]:
    """Yield the members of a tar of `size` bytes, in order, from the headers at byte `start` on.

    Raises UserError, naming the member or the byte, for a damaged header, a size that no tar has, a sparse member, an
    end that is missing or has anything but zeros behind it.
    """
    position = start
    while (member := _next(file, position, size)) is not None:
        yield member
        position = member.end
    _check_zeros(file, position)


def _next(file: BinaryIO, offset: int, size: int) -> Member | None:
    """Return the member whose headers begin at `offset`; None at the end of the tar."""
    given: dict[str, str] = {}
    position = offset
    while True:
        file.seek(position)
        header = _header(file.read(BLOCK), position)
        position += BLOCK
        if header is None:
            if given:
                raise UserError(f"the member at byte {offset} has no header of its own")
            return None
        if header.type not in (*_LONG, *_EXTENDED):
            return _member(header, given, offset, position, size)
        if not 0 <= header.size <= min(MOST_HEADER, size - position):
            raise UserError(f"the extended header at byte {position - BLOCK} says {shown(header.size)} bytes")
        content = file.read(header.size)
        position += -(-header.size // BLOCK) * BLOCK
        if header.type in _LONG:
            given[_LONG[header.type]] = _text(content.partition(b"\0")[0])
        elif found := _records(content, position):
            if header.type == tarfile.XGLTYPE:
                raise UserError(f"the header for all members at byte {position} sets {shown(sorted(found)[0])}")
            given.update(found)


_LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


def _header(block: bytes, position: int) -> tarfile.TarInfo | None:
    """Return the header in a block; None for a block of zeros. Raises UserError naming `position` if it is neither."""
    if not block:
        raise UserError("has no end: it is cut off")
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        if block.strip(b"\0") or len(block) < BLOCK:
            raise UserError(f"no header at byte {position} ({error})") from None
        return None
    except (ValueError, OverflowError) as error:
        raise UserError(f"no header at byte {position} ({str(error)[:100]})") from None


def _member(header: tarfile.TarInfo, given: dict[str, str], offset: int, start: int, size: int) -> Member:
    name = given.get("path", header.name)
    if header.type == tarfile.GNUTYPE_SPARSE or any(field.startswith(_SPARSE) for field in given):
        raise UserError(f"member {shown(name)} is stored as sparse; make the tar without --sparse")
    said = given.get("size", "")
    if said and not (said.isdecimal() and said.isascii() and len(said) < 20):
        raise UserError(f"member {shown(name)} says {shown(said)} bytes")
    member = Member(name.rstrip("/") if "path" in given else name, offset, start, int(said or header.size),
                    header.type, given.get("linkpath", header.linkname))  # fmt: skip
    if member.size < 0:
        raise UserError(f"member {shown(name)} says {member.size} bytes")
    if member.end > size:
        raise UserError(f"ends inside {shown(name)}, which says {shown(member.size)} bytes")
    return member


def _records(content: bytes, position: int) -> dict[str, str]:
    """Return path, linkpath, size and GNU.sparse.* as an extended header sets them; others are passed over."""
    found, at = {}, 0
    while at < len(content) and content[at]:
        digits = content[at : at + 8].partition(b" ")[0]
        length = int(digits) if digits.isdigit() else 0
        record = content[at : at + length]
        key, is_record, value = record[len(digits) + 1 :].partition(b"=")
        if not is_record or not record.endswith(b"\n"):
            raise UserError(f"the extended header before byte {position} is damaged")
        if (name := _text(key)) in ("path", "linkpath", "size") or name.startswith(_SPARSE):
            found[name] = _text(value[:-1])
        at += length
    return found


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


def _check_zeros(file: BinaryIO, position: int) -> None:
    file.seek(position)
    while block := file.read(_CHUNK):
        if block.strip(b"\0"):
            raise UserError(f"goes on behind its end at byte {position}, as tars that were joined by `cat` do")
        position += len(block)
