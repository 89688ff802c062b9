"""How a rank ends: a line for the user (one for each fault), printed by one rank of all, and an exit code.

| why | exit code |
|---|---|
| done | 0 |
| our fault: an exception | 1, and the traceback |
| before its end, and nothing says why: Megatron has places where it ends a program without a number | 1 |
| the user's input | 2 |
| Ctrl-C, SIGTERM | 130, 143 |

A rank ends with what started it, torchrun or another. SIGUSR1, which batch systems send before the time is up, is taken
for SIGTERM.
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
from omnibal_ext.output import ignore_lost_output, say
from omnibal_ext.parent_watch import kill_with_parent

SIGNALS = (signal.SIGINT, signal.SIGTERM)
UNSAID = "Megatron ended the run without an exit code; why, if it has said so, is in its last lines above"
GRACE = 0.3  # seconds in which a signal reaches all ranks, before the first of them closes its connections


class UnfinishedError(Exception):
    """A run came to an end that is not its own, and nothing says why."""


def run_rank(main: Callable[[], None]) -> None:
    """Run one rank's `main` and end the process as the table says, if `main` does not return."""
    # A stopped rank leaves semaphores of its data workers to Python's tracker, which frees them and would speak of it.
    os.environ["PYTHONWARNINGS"] = ",".join([os.environ.get("PYTHONWARNINGS", ""), "ignore:resource_tracker"]).strip(
        ","
    )
    kill_with_parent(os.getppid())
    ignore_lost_output()
    stopped = _watch_signals()
    try:
        main()
    except UserError as error:
        _give_up(error.lines, 2)
    except (UnfinishedError, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code is not None:
            raise
        _give_up([UNSAID if isinstance(ended, SystemExit) else str(ended)], 1)
    except Exception:
        if stopped.is_set():  # a neighbour has gone: the watcher ends this rank too
            time.sleep(60 * GRACE)
        _is_first_to_speak()  # that torchrun stops the others needs no line
        raise


def _give_up(reasons: Sequence[str], code: int) -> NoReturn:
    _speak(*(f"error: {reason}" for reason in reasons))
    _tell_torchrun(f"error: {'; '.join(reasons)}")
    sys.exit(code)


def _watch_signals() -> threading.Event:
    """End the process at a signal, even while it waits inside a collective; the event is set meanwhile.

    Python runs handlers between two of its own instructions only: a byte written by the interpreter at the signal wakes
    a thread instead. A signal that someone else handles later (Megatron's --exit-signal-handler) is theirs.
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
                elif _is_ours(number):
                    break
            stopped.set()
            _speak(f"stopped by {signal.Signals(number).name}; --load goes on from the last checkpoint saved")
            time.sleep(GRACE)
            os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()
    return stopped


def _leave_to_watcher(number: int, frame: FrameType | None) -> None:
    """The handler of `SIGNALS`."""


def _is_ours(number: int) -> bool:
    return signal.getsignal(number) is _leave_to_watcher


def _speak(*lines: str) -> None:
    if _is_first_to_speak():
        say(*lines, error=True)


def _is_first_to_speak() -> bool:
    """Whether no other rank of this job has spoken; ranks that cannot ask each other all speak."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    with suppress(RuntimeError, ValueError):  # torchrun itself has gone
        where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store = TCPStore(*where, is_master=False, timeout=timedelta(seconds=2))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return bool(store.add(f"last_words/{attempt}", 1) == 1)
    return True


def _tell_torchrun(line: str) -> None:
    """Let torchrun's report, which comes last, repeat the line as the cause."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}))
