"""What our programs say on stdout and stderr: a line stays a line whatever it quotes, and nothing said ends a program.

Names of files, folders and sources are others': an escape code in one would steer the terminal, a line end in one forge
a line of the log. `printable` is where text of others is made fit to be seen.
"""

import contextlib
import errno
import io
import os
import sys
from typing import Any

STREAMS = {1: "stdout", 2: "stderr"}


def printable(text: str) -> str:
    """The text as one line; what is no character to be seen is written as in Python's source: \\n, \\x1b."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(*lines: str, error: bool = False) -> None:
    """Print lines, and at once; on stderr if it is an `error`."""
    print(*map(printable, lines), sep="\n", file=sys.stderr if error else sys.stdout, flush=True)


def ignore_lost_output() -> None:
    """From here on nobody has to read what this program says: the first thing that a program does.

    A pipe whose reader has gone, a disk that is full and a closed terminal take what is written, and lose it. A stream
    that was closed from the beginning leads nowhere, and its number to no file that is opened later.
    """
    for number in (0, *STREAMS):
        with contextlib.suppress(OSError):
            _occupy(number)
    for number, name in STREAMS.items():
        stream = getattr(sys, name)
        if stream is None or _leads_to(stream, number):
            setattr(sys, name, _steady(number, stream))


def output_error() -> str:
    """Why something said on stdout is lost to whoever waits for it; "" if nothing is, or nobody does."""
    lost: OSError | None = getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "lost", None)
    return "" if lost is None or lost.errno == errno.EPIPE else str(lost.strerror)


class _Steady(io.FileIO):
    """A stream to which writing never fails."""

    lost: OSError | None = None
    """The first failure."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.lost = self.lost or error
            return len(data)


def _occupy(number: int) -> None:
    """Let a number that was closed lead nowhere."""
    try:
        os.fstat(number)
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != number:
            os.dup2(nowhere, number)
            os.close(nowhere)
        os.set_inheritable(number, True)


def _leads_to(stream: Any, number: int) -> bool:
    """Whether it is Python's own stream of that number, and none that someone has put in its place."""
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return type(raw) is io.FileIO and not raw.closed and raw.fileno() == number


def _steady(number: int, stream: Any) -> io.TextIOWrapper:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Steady(number, "w", closefd=False)),
        encoding=getattr(stream, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )
