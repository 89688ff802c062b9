"""What the user did wrong, a line for each fault, and the exit codes of our programs."""

import errno
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from omnibal_ext.output import ignore_lost_output, output_error, printable, say
from omnibal_ext.packages import missing_package

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a disk without room, or a user without, answers."""


class UserError(Exception):
    """Bad input. A message is one line: what, where (file, row, layer), the limit, the remedy.

    Faults that are found together are said together: each is an argument, and a line of its own.
    """

    @property
    def lines(self) -> list[str]:
        """The messages; what they quote of others is printable."""
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
    """What the system answered about a file: a disk that is full, a folder where a file should be."""
    remedy = "make room and start again" if error.errno in FULL else "choose another path, or mend what is there"
    where = f"{error.filename}: " if error.filename is not None else ""
    return UserError(f"{where}{error.strerror or error}; {remedy}")


def run_tool(main: Callable[[], None]) -> None:
    """Run a program's `main`; a `UserError` becomes a line a fault on stderr and exit code 2, a signal one and 128 + n.

    So does what the system says of a file. What a program that ends well has said must have come to its reader.
    """
    ignore_lost_output()
    with exit_on_user_error():
        main()
        sys.stdout.flush()
        if reason := output_error():
            raise UserError(f"stdout: {reason}: not all of it is written; give it to another file")


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """End the program as `run_tool` does; by itself around what a program imports and not every user has installed."""
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
