"""What the user did wrong, in one line, and the exit codes of our programs."""

import sys
from collections.abc import Callable


class UserError(Exception):
    """Bad input. The message is one line: what, where (file, row, layer), the limit, the remedy."""


def run_tool(main: Callable[[], None]) -> None:
    """Run a program's `main`; a `UserError` becomes one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
