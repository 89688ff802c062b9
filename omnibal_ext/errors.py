"""Errors of the user, a line each, and the exit codes of our programs."""

import errno
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from omnibal_ext.output import ignore_lost_output, output_error, printable, say
from omnibal_ext.packages import missing_package

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, an exhausted quota, a file at its size limit."""


class UserError(Exception):
    """Bad input. Each argument is the message of one fault, in one line: what, where (file, row, layer), the limit, the
    remedy."""

    @property
    def lines(self) -> list[str]:
        """The messages, with non-printable characters escaped."""
        return [printable(str(message)) for message in self.args]

    def __str__(self) -> str:
        """The messages in one line."""
        return "; ".join(self.lines)


class Stopped(KeyboardInterrupt):
    """A signal asked this program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def from_os_error(error: OSError) -> UserError:
    """A `UserError` for an error of the operating system about a file, such as a full disk."""
    remedy = "make room and start again" if error.errno in FULL else "choose another path, or fix what is there"
    where = f"{error.filename}: " if error.filename is not None else ""
    return UserError(f"{where}{error.strerror or error}; {remedy}")


def run_tool(main: Callable[[], None]) -> None:
    """Run a program's `main`. `UserError`, and an OSError about a file, print a line for each fault on stderr and exit
    with code 2; signal n exits with 128 + n. Output that could not be written to stdout is an error too."""
    ignore_lost_output()
    with exit_on_user_error():
        main()
        sys.stdout.flush()
        if reason := output_error():
            raise UserError(f"stdout: {reason}: not all of it is written; give it to another file")


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turn errors into messages and exit codes, as `run_tool` does; also for imports of optional packages."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not (package := missing_package(error.name or "")):
            raise
        say(f"error: this needs {package}", error=True)
        sys.exit(2)
    except UserError as error:
        say(*(f"error: {line}" for line in error.lines), error=True)
        sys.exit(2)
    except OSError as error:
        if error.errno not in FULL and error.filename is None:
            raise
        say(f"error: {from_os_error(error)}", error=True)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
        say(f"stopped by {signal.Signals(number).name}", error=True)
        sys.exit(128 + number)
