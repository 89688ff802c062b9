"""A process that dies costs one line, which names what it worked on, and nothing of the others' work."""

import faulthandler
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.launch.apart import apart, each_apart
from omnibal_ext.reading import memory
from omnibal_ext.reading.costs import tried
from omnibal_ext.reading.memory import memory_beyond


def work(number: int, fate: str = "") -> int:
    if fate.startswith("SIG"):
        faulthandler.disable()
        os.kill(os.getpid(), getattr(signal, fate))
    if fate == "exit":
        os._exit(3)
    if fate == "refuse":
        raise UserError(f"number {number}")
    if fate == "fail":
        raise KeyError(number)
    if fate == "end":  # when all are forked: an exception in a callback of fork is swallowed
        os.kill(os.getppid(), signal.SIGALRM)
        time.sleep(1000)
    if fate in ("wait", "stand"):
        time.sleep({"wait": 0.2, "stand": 1000}[fate])
    return number * number


def _take_all(values: Iterator[int], found: list[int]) -> None:
    for value in values:
        found.append(value)


class _OfParent:
    """What only the process that made it can end, as a film with threads; in a circle, so that it is left to gc."""

    def __init__(self) -> None:
        self.owner, self.circle = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGSEGV)


def collect() -> int:
    return min(gc.collect(), 1)


def place(number: int, *_: str) -> str:
    return f"file {number}"


@pytest.mark.parametrize("workers", [1, 3, 20])
def test_every_task_is_done_once(workers: int) -> None:
    assert sorted(each_apart(work, [(number,) for number in range(9)], workers, place)) == [n * n for n in range(9)]
    assert list(each_apart(work, [], workers, place)) == []


@pytest.mark.parametrize("fork", [lambda: apart(collect, (), "a file"), lambda: tried(collect, "a file", "go on")])
def test_garbage_of_the_parent_is_left_to_the_parent(fork: Callable[[], int]) -> None:
    gc.disable()
    try:
        _OfParent()
        assert fork() in (0, 1)
    finally:
        gc.enable()


@pytest.mark.parametrize("fork", [lambda: apart(collect, (), "a file"), lambda: tried(collect, "a file", "go on")])
def test_a_library_s_hook_behind_a_fork_collects_nothing_of_the_parent(fork: Callable[[], int]) -> None:
    """What it makes is enough for a collection to be due, before the fork has done anything."""
    before = gc.get_threshold()
    gc.set_threshold(100_000)
    try:
        _OfParent()
        _Hook.makes = 1000
        assert fork() in (0, 1)
        assert gc.isenabled()
    finally:
        _Hook.makes = 0
        gc.set_threshold(*before)


class _Hook:
    """What a library does in each fork of this process, once it is told to."""

    makes = 0

    @classmethod
    def run(cls) -> None:
        if cls.makes:
            gc.set_threshold(100)
            cls.kept = [[number] for number in range(cls.makes)]


os.register_at_fork(after_in_child=_Hook.run)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fate", ["SIGSEGV", "SIGABRT", "SIGKILL", "exit"])
def test_a_process_that_dies_is_named_by_its_task_and_the_others_end(workers: int, fate: str) -> None:
    found: list[int] = []
    tasks = [(1, "wait"), (2, fate), *((number, "wait") for number in range(3, 9))]
    with pytest.raises(UserError) as error:
        _take_all(each_apart(work, tasks, workers, place), found)
    assert 1 in found  # it was begun
    assert len(found) < 7  # not all of the others were
    how = {"exit": "ended with code 3", "SIGKILL": "was killed"}.get(fate, f"was ended by {fate}")
    assert str(error.value).startswith(f"file 2: the process that read it {how}")


def test_who_is_asked_to_end_does_not_wait_for_what_stands() -> None:
    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, end)
    with pytest.raises(KeyboardInterrupt):
        list(each_apart(work, [(1, "stand"), (2, "end")], 2, place))
    signal.signal(signal.SIGALRM, before)


def test_what_the_work_raises_is_raised_here() -> None:
    with pytest.raises(UserError, match="number 4"):
        apart(work, (4, "refuse"), "")
    with pytest.raises(KeyError, match="4") as error:
        apart(work, (4, "fail"), "")
    assert "in work" in error.value.__notes__[0]


def test_large_results_of_others_do_not_block_an_error() -> None:
    def large(number: int) -> bytes:
        return bytes(2**22) if number else work(0, "refuse").to_bytes()

    with pytest.raises(UserError, match="number 0"):
        list(each_apart(large, [(1,), (2,), (0,), (3,)], 3, lambda number: f"{number}"))


def take(size: int, beyond: int) -> int:
    with memory_beyond(beyond):
        return len(bytearray(size))


def test_memory_is_limited_in_processes_of_their_own_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_BEYOND", 2**27)  # an allocator takes its 64 MiB for another thread
    assert take(2**28, 0) == 2**28
    assert apart(take, (2**28, 2**28), "") == 2**28
    with pytest.raises(MemoryError):
        apart(take, (2**28, 0), "")
