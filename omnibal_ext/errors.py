"""What the user did wrong, in one line, and the exit codes of our programs."""

import signal
import sys
from collections.abc import Callable


class UserError(Exception):
    """Bad input. The message is one line: what, where (file, row, layer), the limit, the remedy."""

    def __str__(self) -> str:
        """The message; line ends and control characters that it quotes from a file are spaces."""
        message = super().__str__()
        return message if message.isprintable() else "".join(c if c.isprintable() else " " for c in message)


class Stopped(KeyboardInterrupt):
    """A signal asked this program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_tool(main: Callable[[], None]) -> None:
    """Run a program's `main`; a `UserError` becomes one line on stderr and exit code 2, a signal one and 128 + n."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
        print(f"stopped by {signal.Signals(number).name}", file=sys.stderr)
        sys.exit(128 + number)
