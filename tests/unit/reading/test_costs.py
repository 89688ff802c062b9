"""What others' files cost is limited: by a fork that tries them, and for each conversation."""

import mmap
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnibal_ext.errors import MOST_CHARACTERS, UserError
from omnibal_ext.reading import costs
from omnibal_ext.reading.checks import integer
from omnibal_ext.reading.costs import CostError, bounded, tried
from omnibal_ext.reading.fields import Fields
from tests.programs import fresh_python


def spin() -> None:
    while True:
        pass


def refuse() -> None:
    raise UserError("one", "two")


class Panic(BaseException):
    """As pyo3's: no Exception."""


def panic() -> None:
    raise Panic("index out of bounds")


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: bytearray(2**40), "takes more memory than allowed"),
        (os.abort, "ends the process that reads it by SIGABRT"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "ends the process that reads it by SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGXCPU), "takes longer than allowed"),
        (lambda: os._exit(3), "ends the process that reads it with exit code 3"),
        (lambda: os._exit(0), "ends the process"),
        (panic, "Panic: index out of bounds"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_a_file_does_to_a_fork_is_one_line_here(work: Callable[[], Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^a.json: .*{said}.*; get another$") as refusal:
        tried(work, "a.json", "get another")
    assert len(refusal.value.lines) == 1


def test_a_fork_gives_its_value_and_its_errors() -> None:
    assert tried(lambda: ["a", 1, None], "a.json", "get another") == ["a", 1, None]
    with pytest.raises(UserError) as refusal:
        tried(refuse, "a.json", "get another")
    assert refusal.value.lines == ["one", "two"]


def test_a_fork_has_so_many_bytes_beyond_what_this_process_has() -> None:
    assert tried(lambda: len(bytes(2**25)), "a.json", "get another", most_bytes=2**27) == 2**25
    with pytest.raises(UserError, match="takes more memory than allowed"):
        tried(lambda: len(bytes(2**28)), "a.json", "get another", most_bytes=2**27)


def test_a_fork_that_never_ends_is_ended_by_its_seconds_of_processor() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(UserError, match="takes longer than allowed"):
        tried(spin, "a.json", "get another", seconds=1)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_work_within_the_limits_of_a_conversation_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    assert bounded(lambda: bounded(lambda: 3)) == 3
    monkeypatch.setattr(costs, "SECONDS", 0.2)
    monkeypatch.setattr(costs._Bounded, "process", 0)  # the alarm is set anew
    for work in (spin, lambda: bounded(spin), spin):  # of two the outer one's seconds are all
        with pytest.raises(CostError, match="seconds"):
            bounded(work)
    with pytest.raises(CostError, match="memory"):
        bounded(lambda: "a" * 2**40)
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 / 0)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    until = time.process_time() + 0.5
    while time.process_time() < until:
        pass
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0, "it has rung, and was turned off"
    with pytest.raises(CostError, match="seconds"):
        bounded(spin)


def test_the_alarm_does_not_end_a_process_that_ends() -> None:
    asks = "import atexit, signal; atexit.register(lambda: print(signal.getitimer(signal.ITIMER_VIRTUAL)[0]))"
    done = fresh_python("-c", f"{asks}\nfrom omnibal_ext.reading.costs import bounded\nbounded(int)")
    assert (done.returncode, done.stdout) == (0, "0.0\n"), done.stderr


def test_a_process_that_has_grown_itself_is_no_fault_of_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "BYTES", 2**26)
    bounded(int)
    with mmap.mmap(-1, 2**28):
        assert len(bounded(lambda: bytes(2**25))) == 2**25


@pytest.mark.parametrize(
    ("count", "length"), [(1, 10), (1, 1390), (1, 10**5), (2, 1390), (2, 10**5), (9, 300), (10_000, 10), (300, 1401)]
)
@pytest.mark.parametrize("letter", ["a", "\x1b"])
def test_messages_are_a_screen_at_most(count: int, length: int, letter: str) -> None:
    error = UserError(*(f"{n}: {letter * length}; mend it" for n in range(count)))
    assert len(str(error)) <= MOST_CHARACTERS
    assert all(line.isprintable() for line in error.lines)
    assert error.lines[0].startswith("0: ")
    assert error.lines[0].endswith("; mend it")
    shown = sum(line.endswith("; mend it") for line in error.lines)
    assert error.lines[shown:] == ([f"and {count - shown} more faults"] if shown < count else [])
    wrapped = UserError(f"file.json: {error}; download it again")
    assert len(str(wrapped)) <= MOST_CHARACTERS
    assert str(wrapped).endswith("; download it again")


def test_a_field_is_checked_when_it_is_read_and_one_without_check_never_is() -> None:
    fields = Fields(Path("a.json"), {"side": "x", "none": None, "other": 1}, {"side": integer(), "none": integer()})
    assert fields.get("none") is None
    assert fields.get("none", 3) is None
    assert "side" in fields
    with pytest.raises(UserError, match=r"a\.json: side must be a whole number"):
        fields.get("side")
    with pytest.raises(AssertionError, match="other"):
        fields.get("other")
