"""torchrun, but with exit code 2 if a rank raised `UserError`, 1 if one failed otherwise, and ranks of one machine that
no other machine reaches.

python -m omnibal_ext.launch.torchrun <torchrun's arguments>

It forwards signals to the ranks, which may get them from the launcher too, and ends after them.
"""

import logging
import os
import signal
import sys

from omnibal_ext.files.caches import own_torch_caches
from omnibal_ext.launch.loopback import meet_here
from omnibal_ext.launch.processes import SIGNALS, forward
from omnibal_ext.output import ignore_lost_output, say


def main() -> None:
    """Run the ranks; print a line on the first that failed, unless its exit code means that it printed one itself."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.run import get_args_parser, run

    ignore_lost_output()
    own_torch_caches()  # once, for all ranks
    logging.disable(logging.ERROR)
    received: list[int] = []
    for number in SIGNALS:  # a handler: ranks would inherit SIG_IGN
        signal.signal(number, lambda number, _: _forward(number, received))
    words, parser = sys.argv[1:], get_args_parser()
    if "--signals-to-handle" in parser._option_string_actions:
        words = ["--signals-to-handle=SIGQUIT", *words]
    arguments = parser.parse_args(words)
    if arguments.standalone or arguments.nnodes in ("1", "1:1"):
        meet_here(arguments)
    try:
        record(run)(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if received:
            sys.exit(128 + received[0])
        if failure.exitcode == 2:
            sys.exit(2)
        say(f"error: rank {rank} {_how(failure.exitcode)}; its last words are above", error=True)
        sys.exit(1)


def _forward(number: int, received: list[int]) -> None:
    """Send the signal to the ranks; exit if there are none yet."""
    received.append(number)
    if not forward(number, os.getpid()):
        os._exit(128 + number)


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"failed with exit code {exit_code}"
    hint = " (out of memory on this machine?)" if -exit_code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-exit_code).name}{hint}"


if __name__ == "__main__":
    main()
