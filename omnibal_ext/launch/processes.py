"""Child processes that end with this program: it forwards signals to them, and Linux kills them if it is killed.

Children run in separate sessions, so that Ctrl-C reaches this program alone. Ranks end with their torchrun likewise.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import IO, Any

import psutil

from omnibal_ext.errors import Stopped, run_tool
from omnibal_ext.launch.scratch import scratch
from omnibal_ext.output import say

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to end; a batch system may send SIGUSR1 before the time limit."""
GRACE_SECONDS = 20.0
PR_SET_CHILD_SUBREAPER = 36
"""Linux: orphaned descendants become children of this process, so that they can be found."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Context in which `SIGNALS` raise `Stopped`, except those ignored before (nohup)."""

    def stop(number: int, _: FrameType | None) -> None:
        raise Stopped(number)

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def descendants(pid: int) -> list[psutil.Process]:
    """All descendants of a process, parents before children.

    `psutil.Process.children` also compares start times, and so misses processes if the clock has been set.
    """
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter(["ppid", "status"]):
        children.setdefault(process.info["ppid"], []).append(process)
    found = list(children.get(pid, ()))
    for process in found:  # `found` grows in the loop
        found += children.get(process.pid, ())
    return found


def end_tree() -> None:
    """Kill all descendants of this process, orphaned ones included."""
    while left := [process for process in descendants(os.getpid()) if process.info["status"] != psutil.STATUS_ZOMBIE]:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _started(command: Sequence[str], streams: dict[str, Any], variables: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a child that ends with this process, with more environment variables; no thread may hold a lock yet, as
    `preexec_fn` requires."""
    before, environment = kill_with_this_process(), {**(streams.get("env") or os.environ), **variables}
    streams = {"errors": "replace", **streams, "env": environment}
    return subprocess.Popen(command, start_new_session=True, text=True, preexec_fn=before, **streams)  # noqa: PLW1509


def run_to_end(command: Sequence[str], **streams: Any) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run(check=False)`, but kills the child and its descendants when this program is stopped.

    Their temporary files go with them (`scratch`).
    """
    with scratch() as variables, _started(command, streams, variables) as child:
        try:
            output, errors = child.communicate()
        except BaseException:
            end_tree()
            raise
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def run_fork(work: Callable[..., None], *arguments: Any, **named: Any) -> None:
    """Call `work` in a fork of this process; if it fails, exit with its exit code, that of `run_tool`.

    A fork takes values, starts without imports, leaves no memory behind, and is killed when this program is stopped. In
    this process what a signal's handler raises amid a compiled function would become a SystemError.
    """
    task = partial(run_tool, partial(work, *arguments, **named))
    child = multiprocessing.get_context("fork").Process(target=_begin, args=(kill_with_this_process(), task))
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the fork has none of our handlers
    try:
        child.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        child.join()
    except BaseException:
        end_tree()
        raise
    if child.exitcode:
        sys.exit(child.exitcode)


def _begin(follow: Callable[[], None], task: Callable[[], None]) -> None:
    """Do a fork's task with the signals, session and warnings of a program that this one starts."""
    follow()
    os.setsid()
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    warnings.simplefilter("ignore")
    task()


def run_ranks(
    command: Sequence[str],
    log: IO[str] | None = None,
    grace: float | None = GRACE_SECONDS,
    follow: Callable[[Callable[[], bool]], None] | None = None,
) -> int:
    """Run torchrun (`omnibal_ext.launch.torchrun`) and return its exit code.

    Its output goes to `log` or, without one, to ours. `follow` is called with a function that tells whether torchrun
    runs. Signals are forwarded to the ranks, which have `grace` seconds to end (None: no limit, so that they can save)
    unless Ctrl-C interrupts that.
    """
    with scratch() as variables, _started(command, {"stdout": log, "stderr": log}, variables) as agent:
        try:
            if follow:
                follow(lambda: agent.poll() is None)
            agent.wait()
        except Stopped as stop:
            _end_ranks(agent, stop.number, grace)
            raise
        finally:
            end_tree()
    if agent.returncode < 0:
        say(f"error: torchrun was ended by {signal.Signals(-agent.returncode).name}, and its ranks", error=True)
        return 1
    return agent.returncode


def _end_ranks(agent: subprocess.Popen[str], number: int, grace: float | None) -> None:
    """Send the ranks SIGINT for SIGINT, SIGTERM for any other signal; wait until the agent, their parent, has ended.

    Waits `grace` seconds at most (None: no limit), then returns: the caller kills what is left.
    """
    for repeated in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # Slurm may repeat signals
        signal.signal(repeated, signal.SIG_IGN)
    if forward(number, agent.pid):
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(timeout=grace)


def forward(number: int, parent: int) -> bool:
    """Send a signal to the children of `parent`, a descendant of this process or itself; whether there are any."""
    children = [process for process in descendants(os.getpid()) if process.info["ppid"] == parent]
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
    return bool(children)


def python(*words: object) -> list[str]:
    """The command of a program or module (-m NAME) of Python's, without its warnings."""
    return [sys.executable, "-W", "ignore", *map(str, words)]


def run_python(*words: object, **streams: Any) -> subprocess.CompletedProcess[str]:
    """`run_to_end` of a program or module (-m NAME) of Python's."""
    return run_to_end(python(*words), **streams)


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
