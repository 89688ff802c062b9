"""Printing to stdout and stderr: untrusted text is escaped, and a failure to write does not end the program.

Names of files, folders and sources are untrusted: an escape code in one would control the terminal, a line end would
forge a line of the log.
"""

import contextlib
import errno
import io
import os
import sys
from typing import Any

STREAMS = {1: "stdout", 2: "stderr"}


def printable(text: str) -> str:
    """Return the text in one line; non-printable characters are escaped as in Python: \\n, \\x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(*lines: str, error: bool = False) -> None:
    """Print lines, escaped, and flush; `error`: to stderr."""
    print(*map(printable, lines), sep="\n", file=sys.stderr if error else sys.stdout, flush=True)


def ignore_lost_output() -> None:
    """Make stdout and stderr discard what they cannot write; call this before anything else.

    So a closed pipe, a full disk or a closed terminal does not end the program. A standard stream that is closed at the
    start is opened on /dev/null, so that no other file gets its descriptor.
    """
    for number in (0, *STREAMS):
        with contextlib.suppress(OSError):
            _occupy(number)
    for number, name in STREAMS.items():
        stream = getattr(sys, name)
        if stream is None or _leads_to(stream, number):
            setattr(sys, name, _lossy(number, stream))


def output_error() -> str:
    """Return the first error of writing to stdout; "": none, or the reader has closed the pipe."""
    lost: OSError | None = getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "lost", None)
    return "" if lost is None or lost.errno == errno.EPIPE else str(lost.strerror)


class _LossyFile(io.FileIO):
    """A file that discards what cannot be written, and keeps the first error."""

    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.lost = self.lost or error
            return len(data)


def _occupy(number: int) -> None:
    """Open /dev/null on a standard descriptor (0, 1, 2) if it is closed."""
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number)
            os.close(null)
        os.set_inheritable(number, True)


def _leads_to(stream: Any, number: int) -> bool:
    """Say whether a stream is the one that Python opened on that descriptor, not a replacement."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return type(raw) is io.FileIO and not raw.closed and raw.fileno() == number


def _lossy(number: int, stream: Any) -> io.TextIOWrapper:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LossyFile(number, "w", closefd=False)),
        encoding=getattr(stream, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )
