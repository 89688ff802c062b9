"""torchrun with an exit code that says why: 2 where a rank refused the user's input, 1 where one failed.

python -m omnibal_ext.launch.torchrun <torchrun's arguments>

Signals are not this program's: the ranks get them from the one who started it, and it ends when they have.
"""

import logging
import signal
import sys


def main() -> None:
    """Run the ranks; name the one that failed first, in one line, unless it has said itself what is wrong."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser
    from torch.distributed.run import main as torchrun

    logging.disable(logging.ERROR)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        # A handler, as what is ignored stays ignored in the ranks.
        signal.signal(number, lambda *_: None)
    words = sys.argv[1:]
    if "--signals-to-handle" in get_args_parser()._option_string_actions:
        words = ["--signals-to-handle=SIGQUIT", *words]
    try:
        torchrun(words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == 2:
            sys.exit(2)
        print(f"error: rank {rank} {_how(failure.exitcode)}; its last words are above", file=sys.stderr)
        sys.exit(1)


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"failed with exit code {exit_code}"
    hint = " (out of memory on this machine?)" if -exit_code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-exit_code).name}{hint}"


if __name__ == "__main__":
    main()
