"""JSON lists of conversations, one a file, as LLaVA's are.

Its elements are found by their brackets and strings alone, a block of the file at a time, and decoded one by one later:
what is no JSON in itself is one rejected row.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from megatron.vlm.data.formats.rows import MOST_BYTES, InputFile, PartSource, Row, bulk_of, named_errors
from omnibal_ext.reading.checks import shown
from omnibal_ext.reading.document import described
from omnibal_ext.reading.files import open_plain, read_at

REMEDY = "fix or split the file"
MOST_DEPTH = 1000
"""Most brackets within brackets; JSON decoders do not take more."""
_WHAT = "is no JSON list to its end"
_BLOCK = 2**20
_SPACE = re.compile(rb"[ \t\r\n]*+")
_QUOTED = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_STRING = re.compile(_QUOTED, re.DOTALL)
_WORD = re.compile(rb'[^]\[{}", \t\r\n]++')
_TO_BRACKET = re.compile(rb'[^]\[{}"]*+(?:%b[^]\[{}"]*+)*+' % _QUOTED, re.DOTALL)
_CLOSING = {ord("["): ord("]"), ord("{"): ord("}")}


def _within(depth: int) -> bytes:
    """Return a regular expression of a bracketed JSON value with at most `depth` further levels of brackets inside."""
    inner = rb'(?:[^]\[{}"]++|%b%b)*+' % (_QUOTED, b"|" + _within(depth - 1) if depth else b"")
    return rb"(?:\{%b\}|\[%b\])" % (inner, inner)


_SHALLOW = re.compile(_within(3), re.DOTALL)
"""Pattern that matches nearly all elements at once."""


def cut(path: Path, rows_per_part: int) -> InputFile:
    """Cut a file into parts of `rows_per_part` elements. Raises UserError unless it is one JSON list alone."""
    parts, spans, count = [], [], 0
    with named_errors(path, _WHAT, REMEDY), open_plain(path, REMEDY) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(0)
        text = _Text(file)
        try:
            text.open_list()
            found = text.elements()
            while spans := list(islice(found, rows_per_part)):
                start, end = spans[0][0], spans[-1][1]
                parts.append(PartSource(path, start, end - start, count + 1, len(spans), "json_list"))
                count += len(spans)
            text.close()
        except _FaultError as fault:
            raise ValueError(_first_fault(file, text.start, fault)) from None
    return InputFile(path, digest, count, tuple(parts))


def _first_fault(file: BinaryIO, start: int, fault: "_FaultError") -> str:
    """Say what is wrong, in which line and behind which words, as a JSON decoder sees the element from byte `start` on.

    A quote that is missing turns words into strings and strings into words, so brackets alone tell nothing of where.
    """
    element, words, position = read_at(file, start, _BLOCK).decode(errors="replace"), *fault.args
    with suppress(RecursionError):
        try:
            json.JSONDecoder().raw_decode(element)
        except json.JSONDecodeError as error:
            if error.pos < len(element) and not error.msg.startswith("Unterminated"):
                words, position = described(error), start + len(element[: error.pos].encode())
    before = read_at(file, max(position - 40, 0), min(position, 40)).decode(errors="replace")
    return f"line {_line_of(file, position)}, behind {shown(before)}: {words}"


def _line_of(file: BinaryIO, position: int) -> int:
    """Return the number, from 1, of the line that has this byte."""
    file.seek(0)
    blocks = (file.read(min(_BLOCK, position - at)) for at in range(0, position, _BLOCK))
    return 1 + sum(block.count(b"\n") for block in blocks)


def is_list(start: bytes) -> bool:
    """Return whether a file that begins with these bytes is meant as a list."""
    return start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def rows(part: PartSource) -> Iterator[Row]:
    """Yield the elements of a part."""
    opened = open_plain(part.file, REMEDY), open_plain(part.file, REMEDY)
    with named_errors(part.file, _WHAT, REMEDY), opened[0] as file, opened[1] as records:
        file.seek(part.offset)
        found = islice(_Text(file).elements(), part.lines)
        for number, (start, end) in enumerate(found, start=part.first_line):
            record = read_at(records, start, min(end - start, MOST_BYTES + 1))
            yield Row(number, record, start, fault=bulk_of(record))


class _FaultError(Exception):
    """A fault in a JSON list. Its arguments: what is wrong, and at which byte of the file."""


class _Text:
    """A JSON text that is read block by block. Methods raise _FaultError."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.block, self.at = file, b"", 0
        self.offset = self.start = file.tell()  # of the block, and of the element that is read

    @property
    def position(self) -> int:
        """Byte of the file that is next."""
        return self.offset + self.at

    def open_list(self) -> None:
        """Read past a byte order mark, if any, and the bracket that opens the list."""
        self._more()
        self.at = len(codecs.BOM_UTF8) * self.block.startswith(codecs.BOM_UTF8)
        self._expect(b"[", "a list")

    def elements(self) -> Iterator[tuple[int, int]]:
        """Yield (first byte, end) in the file of each element of the opened list, then pass its closing bracket."""
        if self._next() == b"]":
            self.at += 1
            return
        while True:
            self.start = self.position
            self._pass_value()
            yield self.start, self.position
            if self._next() != b",":
                break
            self.at += 1
            self._next()
        self._expect(b"]", "a comma or the end of the list")

    def close(self) -> None:
        """Read to the end of the file, where only white space may be."""
        while self.at < len(self.block) or self._more():
            self.at = _end(_SPACE, self.block, self.at)
            if self.at < len(self.block):
                raise _FaultError("the list has ended, and more follows", self.position)

    def _next(self) -> bytes:
        """Return the next byte that is no white space, without passing it."""
        while True:
            self.at = _end(_SPACE, self.block, self.at)
            if self.at < len(self.block):
                return self.block[self.at : self.at + 1]
            if not self._more():
                raise _FaultError("the file ends before what begins here", self.start)

    def _expect(self, byte: bytes, what: str) -> None:
        if self._next() != byte:
            raise _FaultError(f"{what} is due", self.position)
        self.at += 1

    def _pass_value(self) -> None:
        first = self.block[self.at]
        if first in _CLOSING:
            self._pass_brackets()
        elif first == ord('"'):
            while (found := _STRING.match(self.block, self.at)) is None:
                self._need_more()
            self.at = found.end()
        else:
            while (end := _end(_WORD, self.block, self.at)) == len(self.block):
                self._need_more()
            if end == self.at:
                raise _FaultError("no element", self.position)
            self.at = end

    def _pass_brackets(self) -> None:
        if found := _SHALLOW.match(self.block, self.at):
            self.at = found.end()
            return
        due = bytearray()
        while True:
            self.at = _end(_TO_BRACKET, self.block, self.at)
            if self.at == len(self.block) or (byte := self.block[self.at]) == ord('"'):
                self._need_more()
                continue
            self.at += 1
            if byte in _CLOSING:
                due.append(_CLOSING[byte])
                if len(due) > MOST_DEPTH:
                    raise _FaultError(f"nested deeper than {MOST_DEPTH}", self.position)
            elif due.pop() != byte:
                raise _FaultError("a bracket of another kind is due", self.position)
            if not due:
                return

    def _need_more(self) -> None:
        if len(self.block) - self.at > MOST_BYTES:
            raise _FaultError(f"more than {MOST_BYTES} bytes without an end", self.position)
        if not self._more():
            raise _FaultError("the file ends before what begins here", self.start)

    def _more(self) -> bool:
        """Read on, as much as is left of the block: so a long string is not searched again and again. False: the
        end."""
        more = self.file.read(max(_BLOCK, len(self.block) - self.at))
        self.block, self.offset, self.at = self.block[self.at :] + more, self.position, 0
        return bool(more)


def _end(pattern: re.Pattern[bytes], text: bytes, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
