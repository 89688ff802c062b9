"""torchrun with an exit code that says why: 2 where a rank refused the user's input, 1 where one failed.

python -m omnibal_ext.launch.torchrun <torchrun's arguments>

A signal that asks it to end is handed to the ranks, whom its launcher may have told already; it ends when they have.
"""

import contextlib
import logging
import os
import signal
import sys

import psutil

from omnibal_ext.launch.processes import SIGNALS, descendants
from omnibal_ext.output import ignore_lost_output, say


def main() -> None:
    """Run the ranks; name the one that failed first, in one line, unless it has said itself what is wrong."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import main as torchrun

    ignore_lost_output()
    logging.disable(logging.ERROR)
    told: list[int] = []
    for number in SIGNALS:  # a handler, as what is ignored stays ignored in the ranks
        signal.signal(number, lambda number, _: _hand_on(number, told))
    words = sys.argv[1:]
    if "--signals-to-handle" in get_args_parser()._option_string_actions:
        words = ["--signals-to-handle=SIGQUIT", *words]
    try:
        torchrun(words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if told:  # so they ended, and have said so
            sys.exit(128 + told[0])
        if failure.exitcode == 2:
            sys.exit(2)
        say(f"error: rank {rank} {_how(failure.exitcode)}; its last words are above", error=True)
        sys.exit(1)


def _hand_on(number: int, told: list[int]) -> None:
    """Tell the ranks to end; where there are none yet, end."""
    told.append(number)
    ranks = [process for process in descendants(os.getpid()) if process.info["ppid"] == os.getpid()]
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
    if not ranks:
        os._exit(128 + number)


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"failed with exit code {exit_code}"
    hint = " (out of memory on this machine?)" if -exit_code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-exit_code).name}{hint}"


if __name__ == "__main__":
    main()
