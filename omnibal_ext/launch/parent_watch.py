"""Processes that end when their parent ends, even if that is killed."""

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
    """Have Linux kill this process when `parent`, which started it, ends; exit at once if it has ended already.

    Linux watches the parent's thread, so processes that call this must be started by the main thread.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def kill_with_this_process() -> Callable[[], None]:
    """Return a function that children of this process call first, as `preexec_fn` or `initializer`."""
    return partial(kill_with_parent, os.getpid())


def exit_with_parent(*_: object) -> None:
    """Exit this `multiprocessing` process when the process that created it ends.

    Unlike `kill_with_parent` this works under a fork server, where the parent is the server. Arguments are ignored, so
    that it can be an initializer.
    """
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
