"""Child processes that never outlive us: a signal that stops this program stops all that it started.

Children run in sessions of their own, so that Ctrl-C on a terminal reaches this program alone, which then decides. If
it is killed itself, Linux kills them, and ranks end with their torchrun in the same way.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import IO, Any

import psutil

from omnibal_ext.errors import Stopped
from omnibal_ext.output import say
from omnibal_ext.parent_watch import kill_with_this_process

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""SIGUSR1 is what a batch system may send before the time is up."""
GRACE_SECONDS = 20.0
ERROR = "error: "
PR_SET_CHILD_SUBREAPER = 36
"""Linux: children whose parent ended become ours, so that they can be found."""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside, a signal that asks to end raises `Stopped`; one that was ignored before (nohup) stays ignored."""

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
    """Every process below that one, parents before children.

    By the parents that the system names: `psutil.Process.children` compares times of the clock as well, and misses a
    young process where the clock was set in between.
    """
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter(["ppid", "status"]):
        children.setdefault(process.info["ppid"], []).append(process)
    found = list(children.get(pid, ()))
    for process in found:  # grows
        found += children.get(process.pid, ())
    return found


def end_tree(child: subprocess.Popen[str]) -> None:
    """End a child, all that it started and what was left of them, at once; this process has no other children."""
    child.kill()
    while left := [process for process in descendants(os.getpid()) if process.info["status"] != psutil.STATUS_ZOMBIE]:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.01)
    child.wait()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _started(command: Sequence[str], streams: dict[str, Any]) -> subprocess.Popen[str]:
    """A child that ends with us; no thread runs yet that could hold what it needs."""
    before, streams = kill_with_this_process(), {"errors": "replace", **streams}
    return subprocess.Popen(command, start_new_session=True, text=True, preexec_fn=before, **streams)  # noqa: PLW1509


def run_to_end(command: Sequence[str], **streams: Any) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` without a check; stopped, it takes the child and all its children along."""
    with _started(command, streams) as child:
        try:
            output, errors = child.communicate()
        except BaseException:
            end_tree(child)
            raise
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


def run_ranks(
    command: Sequence[str],
    log: IO[str] | None = None,
    grace: float | None = GRACE_SECONDS,
    follow: Callable[[Callable[[], bool]], None] | None = None,
) -> int:
    """Run torchrun (`omnibal_ext.launch.torchrun`) and return its exit code.

    Its output goes to `log`, or through: lines of errors that several ranks print appear once. `follow` watches it,
    given whether it still runs. A signal is handed to the ranks, which get `grace` seconds to end (None: as many as
    they need, to save what they have); only Ctrl-C ends them before that.
    """
    streams: dict[str, Any] = {"stdout": log, "stderr": log} if log else {"stderr": subprocess.PIPE}
    with _started(command, streams) as agent:
        errors = _ErrorLines(agent.stderr) if agent.stderr else None
        try:
            if follow:
                follow(lambda: agent.poll() is None)
            agent.wait()
        except Stopped as stop:
            if errors:
                errors.only_ours = True
            _end_ranks(agent, stop.number, grace)
            raise
        finally:
            end_tree(agent)
            if errors:
                errors.join()
    if agent.returncode < 0:
        say(f"error: torchrun was ended by {signal.Signals(-agent.returncode).name}, and its ranks", error=True)
        return 1
    return agent.returncode


def _end_ranks(agent: subprocess.Popen[str], number: int, grace: float | None) -> None:
    """Hand a signal to the ranks and wait for them; the agent, their parent, ends when they have."""
    for repeated in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # Slurm may send one several times
        signal.signal(repeated, signal.SIG_IGN)
    ranks = [process for process in descendants(os.getpid()) if process.info["ppid"] == agent.pid]
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
    if ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(timeout=grace)


class _ErrorLines(threading.Thread):
    """Hands a child's stderr through; what several ranks say alike in an `error:` line is said once."""

    def __init__(self, source: IO[str]) -> None:
        super().__init__(daemon=True)
        self.source, self.only_ours = source, False
        self.start()

    def run(self) -> None:
        """Until the last process that writes has ended."""
        seen = set()
        for line in self.source:
            error = error_of(line)
            if error not in seen and (error or not self.only_ours):
                sys.stderr.write(f"{error}\n" if error else line)
                sys.stderr.flush()
            seen |= {error} - {""}


def error_of(line: str) -> str:
    """The `error:` line of a rank in a line of output, or "". Ranks that write at the same time share a line."""
    said = line.rstrip().split(ERROR)
    return ERROR + said[-1] if said[0] == "" and len(set(said[1:])) == 1 else line.rstrip() * line.startswith(ERROR)
