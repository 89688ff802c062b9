"""A process that does not outlive the one that started it, however that one ended."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partial

PR_SET_PDEATHSIG = 1


def kill_with_parent(parent: int) -> None:
    """Have this process killed when `parent`, which started it, ends; at once if it has ended already.

    To be precise, with the thread that started it: start what calls this from the main thread.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def kill_with_this_process() -> Callable[[], None]:
    """What a child of this process calls first (`preexec_fn` of a program, `initializer` of a worker)."""
    return partial(kill_with_parent, os.getpid())


def exit_with_parent(*_: object) -> None:
    """Have this process, one of `multiprocessing`, end when the one that asked for it has ended.

    Also where a server has forked it, whose end is all that the system would tell of, and which stays as long as it has
    forks. Takes what an initializer is given.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    starter.join()
    os._exit(1)
