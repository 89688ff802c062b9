"""How a rank ends: a line for the user (one for each fault), printed by one rank of all, and an exit code.

| why | exit code |
|---|---|
| done | 0 |
| our fault: an exception | 1, and the traceback |
| ended early without a reason: Megatron calls sys.exit() without a code in some places | 1 |
| the user's input | 2 |
| Ctrl-C, SIGTERM | 130, 143 |

A rank ends when its parent process does, torchrun or another. SIGUSR1, which batch systems send before the time limit,
is treated as SIGTERM.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch.distributed import TCPStore

from omnibal_ext.errors import UserError
from omnibal_ext.launch.processes import kill_with_parent
from omnibal_ext.output import ignore_lost_output, say

SIGNALS = (signal.SIGINT, signal.SIGTERM)
NO_REASON = "Megatron ended the run without an exit code; why, if it has said so, is in its last lines above"
GRACE = 0.3  # seconds until the first rank exits, in which a signal reaches all ranks


class UnfinishedError(Exception):
    """A run ended early for an unknown reason."""


def run_rank(main: Callable[[], None]) -> None:
    """Run one rank's `main`; if it raises or a signal comes, say why and exit (UserError 2, signal 128 + number)."""
    # Else Python's resource tracker warns about semaphores of a stopped rank's data workers, which it frees.
    os.environ["PYTHONWARNINGS"] = ",".join([os.environ.get("PYTHONWARNINGS", ""), "ignore:resource_tracker"]).strip(
        ","
    )
    kill_with_parent(os.getppid())
    ignore_lost_output()
    stopped = _watch_signals()
    try:
        main()
    except UserError as error:
        _fail(error.lines, 2)
    except (UnfinishedError, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code is not None:
            raise
        _fail([NO_REASON if isinstance(ended, SystemExit) else str(ended)], 1)
    except Exception:
        if stopped.is_set():  # caused by another rank's exit: the watcher thread ends this one
            time.sleep(60 * GRACE)
        _is_first_rank_to_print()  # then the ranks that torchrun stops print no line
        raise


def _fail(reasons: Sequence[str], code: int) -> NoReturn:
    _print_once(*(f"error: {reason}" for reason in reasons))
    _tell_torchrun(f"error: {'; '.join(reasons)}")
    sys.exit(code)


def _watch_signals() -> threading.Event:
    """End the process at a signal, even inside a collective; the returned event is set when a signal has come.

    Python runs signal handlers between bytecodes only, so a thread waits on the interpreter's wakeup file instead.
    Signals for which another handler is installed later (Megatron's --exit-signal-handler) are left to it.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in (*SIGNALS, signal.SIGUSR1):
        signal.signal(number, _leave_to_watcher)
    stopped = threading.Event()

    def watch() -> None:
        with writer:  # lives as long as the thread
            for number in iter(lambda: reader.recv(1)[0], None):
                if number == signal.SIGUSR1:
                    os.kill(os.getpid(), signal.SIGTERM)
                elif _is_handled_here(number):
                    break
            stopped.set()
            name = signal.Signals(number).name
            _print_once(f"stopped by {name}; a new start goes on from the last save, if there is one")
            time.sleep(GRACE)
            os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()
    return stopped


def _leave_to_watcher(number: int, frame: FrameType | None) -> None:
    """Do nothing: the handler of `SIGNALS`, whose signals the watcher sees."""


def _is_handled_here(number: int) -> bool:
    return signal.getsignal(number) is _leave_to_watcher


def _print_once(*lines: str) -> None:
    if _is_first_rank_to_print():
        say(*lines, error=True)


def _is_first_rank_to_print() -> bool:
    """Say whether this rank is the job's first to ask, and so prints; True if torchrun's store cannot be asked."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    with suppress(RuntimeError, ValueError):  # torchrun itself has gone
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store = TCPStore(*where, is_master=False, timeout=timedelta(seconds=2))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return bool(store.add(f"last_words/{attempt}", 1) == 1)
    return True


def _tell_torchrun(line: str) -> None:
    """Write the line as the cause into torchrun's error report, which is printed last."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}))
