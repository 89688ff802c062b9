"""What a file of others may cost: seconds of processor, bytes of memory.

A chat template is a program, a tokenizer's file nearly one, and both are run by libraries without limits. Whether
opening one keeps within the limits is `tried` in a fork: so a file that never ends, takes all memory or ends the
process that reads it is a line. What it costs later, for one conversation, is `bounded`.
"""

import atexit
import faulthandler
import json
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from omnibal_ext.errors import UserError
from omnibal_ext.reading.memory import forking, leave_garbage, taken

Value = TypeVar("Value")

SECONDS = 4
"""Processor time: usual files take a tenth of a second."""
BYTES = 400 * 2**20
"""Memory beyond what the process has."""
_WAIT = 15
"""Times as many seconds may pass, where others use the processor too."""
_PANIC = "PanicException"
"""Name of the exception of pyo3's, raised where a library in Rust fails: it cannot be imported, and is no Exception."""


class CostError(Exception):
    """Raised by `bounded` where the work takes more time or memory than allowed."""


def tried(work: Callable[[], Any], what: str, remedy: str, seconds: int = SECONDS, most_bytes: int = BYTES) -> Any:
    """Run `work` in a fork of this process, and return its value, which JSON must be able to hold.

    Raises UserError, naming `what` and the remedy, where it takes more seconds of processor or bytes beyond what this
    process has, ends the process, or fails by anything but a UserError, which is passed on.
    """
    answer, end = os.pipe()
    with warnings.catch_warnings(), forking():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads are not waited for: nothing here asks them
        child = os.fork()
    if not child:
        os.close(answer)
        _answer(work, end, seconds, most_bytes)
    os.close(end)
    try:
        with os.fdopen(answer, "rb") as pipe:
            content = pipe.read()
    except BaseException:  # stopped by a signal
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    limits = f"{seconds} seconds of processor and {most_bytes // 2**20} MiB of memory"
    if status or not content:
        raise UserError(f"{what}: {_death(status, limits)}; {remedy}")
    said = json.loads(content)
    if "value" in said:
        return said["value"]
    if "lines" in said:
        raise UserError(*said["lines"])
    raise UserError(f"{what}: {said['fault'] or f'takes more memory than allowed ({limits})'}; {remedy}")


def _death(status: int, limits: str) -> str:
    if -status in (signal.SIGXCPU, signal.SIGKILL):
        return f"takes longer than allowed ({limits})"
    if -status == signal.SIGALRM:
        return f"gives no answer (allowed: {limits})"
    how = f"by {signal.Signals(-status).name}" if status < 0 else f"with exit code {status}"
    return f"ends the process that reads it {how} (allowed: {limits})"


def _answer(work: Callable[[], Any], end: int, seconds: int, most_bytes: int) -> NoReturn:
    said: dict[str, Any] = {"fault": ""}
    try:
        _confine(seconds, most_bytes)
        said = {"value": work()}
    except UserError as error:
        said = {"lines": error.lines}
    except (MemoryError, CostError) as error:
        said = {"fault": str(error)}
    except BaseException as error:
        said = {"fault": f"{type(error).__name__}: {' '.join(str(error)[:300].split())}"}
    finally:
        with suppress(BaseException):
            os.write(end, json.dumps(said).encode())
        os._exit(0)


def _confine(seconds: int, most_bytes: int) -> None:
    """Limit processor time and memory of this (forked) process, silence its output, and let signals end it."""
    faulthandler.disable()
    leave_garbage()
    for number in (signal.SIGXCPU, signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGVTALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(_WAIT * seconds)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads are not in a fork
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    for name, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, seconds)):
        _lower(name, most)
    _lower(resource.RLIMIT_AS, taken() + most_bytes)


def _lower(name: int, most: int) -> tuple[int, int]:
    """Set a resource limit to `most`, if it is higher; return the (soft, hard) limits before."""
    before = soft, hard = resource.getrlimit(name)
    if soft == resource.RLIM_INFINITY or most < soft:
        resource.setrlimit(name, (most, hard))
    return before


class _Bounded:
    """The state of `bounded`: whether it is running, since when, and in which process its alarm is set."""

    active = False
    begun = 0.0
    process = 0


def _ring(*_: object) -> None:
    """Raise CostError in work of `bounded` that has run for `SECONDS`; without work turn the alarm off.

    It rings after `SECONDS`, then every quarter of them: setting it for each work would take longer than most work.
    """
    if not _Bounded.active:
        _Bounded.process = 0
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    elif time.process_time() - _Bounded.begun >= SECONDS:
        raise CostError(f"takes more than {SECONDS} seconds of processor")


atexit.register(signal.setitimer, signal.ITIMER_VIRTUAL, 0)  # Python drops its handlers before it ends


def bounded(work: Callable[[], Value]) -> Value:
    """Return `work()`, Python code of others, run within `SECONDS` of processor and `BYTES`; in the main thread only.

    Raises CostError beyond them; a call inside of another's `work` shares its limits. A step of Python that computes
    without end cannot be stopped (most end at `BYTES`): what is run must have none.
    """
    if _Bounded.active:
        return work()
    if _Bounded.process != os.getpid():
        _Bounded.process = os.getpid()
        signal.signal(signal.SIGVTALRM, _ring)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, SECONDS / 4)
    limits = _lower(resource.RLIMIT_AS, taken() + BYTES)
    _Bounded.begun, _Bounded.active = time.process_time(), True
    try:
        return work()
    except MemoryError:
        raise CostError(f"takes more than {BYTES // 2**20} MiB of memory") from None
    finally:
        _Bounded.active = False
        resource.setrlimit(resource.RLIMIT_AS, limits)


def is_panic(error: BaseException) -> bool:
    """Say whether an error is the failure of a library in Rust, which is no `Exception`."""
    return type(error).__name__ == _PANIC
