"""Work in forked processes: one that dies is an error that names what it worked on, and the others' work is kept."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from omnibal_ext.errors import UserError
from omnibal_ext.launch.processes import kill_with_this_process
from omnibal_ext.reading.memory import forking, leave_garbage, work_apart

Value = TypeVar("Value")
Work = Callable[..., Value]
_FORK = multiprocessing.get_context("fork")
"""A fresh interpreter would spend seconds importing torch before its first task."""


def each_apart(
    work: Work[Value], tasks: Sequence[tuple[Any, ...]], workers: int, name: Callable[..., str]
) -> Iterator[Value]:
    """`work(*task)` of every task, by forked processes, in order of completion.

    Raises what `work` raises, when the tasks that were begun are done. If a process dies, no further task is begun,
    and UserError names `name(*task)` and the signal when the results of the others are taken.
    """
    left, deaths = iter(range(len(tasks))), []
    with _crew(min(workers, len(tasks)), work, tasks) as crew:
        for worker in crew:
            worker.begin(next(left))
        while busy := {worker.pipe: worker for worker in crew if worker.task is not None}:
            for pipe in wait(list(busy)):
                worker = busy[pipe]  # type: ignore[index]  # they are the connections that were given
                task = tasks[worker.task or 0]
                try:
                    value = worker.answer()
                except (EOFError, ConnectionError):
                    deaths.append(f"{name(*task)}: {worker.fate()}")
                    continue
                if not deaths and (number := next(left, None)) is not None:
                    worker.begin(number)
                yield value
    if deaths:
        raise UserError(*deaths)


@contextmanager
def _crew(count: int, work: Work[Any], tasks: Sequence[tuple[Any, ...]]) -> Iterator[list["_Worker"]]:
    """Fork processes; at the end wait for the tasks that they have begun, or kill them if this one is asked to end."""
    crew: list[_Worker] = []
    try:
        while len(crew) < count:
            crew.append(_Worker(work, tasks, [worker.pipe for worker in crew]))
        yield crew
    except BaseException as error:
        if not isinstance(error, Exception):
            for worker in crew:
                worker.process.kill()
        raise
    finally:
        for worker in crew:
            worker.pipe.close()
        for worker in crew:
            worker.process.join()


def apart(work: Work[Value], task: tuple[Any, ...], name: str) -> Value:
    """`work(*task)`, by a forked process. Raises what it raises, and UserError naming `name` if the process dies."""
    [value] = each_apart(work, [task], 1, lambda *_: name)
    return value


class _Worker:
    """A forked process that does one task of a list after the other, and the number of its task."""

    def __init__(self, work: Work[Any], tasks: Sequence[tuple[Any, ...]], others: Sequence[Connection]) -> None:
        self.pipe, theirs = _FORK.Pipe()
        self.task: int | None = None
        arguments = (theirs, [*others, self.pipe], kill_with_this_process(), work, tasks)
        self.process = _FORK.Process(target=_serve, args=arguments)
        with forking():
            self.process.start()
        theirs.close()  # so that the pipe ends with the process

    def begin(self, task: int) -> None:
        self.task = task
        with suppress(ConnectionError):  # it died before: the answer says so
            self.pipe.send(task)

    def answer(self) -> Any:
        """The value of the task. Raises what the work raised, EOFError or ConnectionError if the process died."""
        self.task = None
        is_value, value = self.pipe.recv()
        if not is_value:
            raise value
        return value

    def fate(self) -> str:
        """What became of the dead process."""
        self.process.join()
        code = self.process.exitcode or 0
        if code == -signal.SIGKILL:
            return "the process that read it was killed, mostly for lack of memory (`dmesg`); take fewer --workers"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"the process that read it {how}, as damaged files can do; copy the file again, or leave it out"


def _serve(
    pipe: Connection,
    of_parent: Sequence[Connection],
    begin: Callable[[], None],
    work: Work[Any],
    tasks: Sequence[tuple[Any, ...]],
) -> None:
    leave_garbage()
    begin()
    for inherited in of_parent:  # so that a pipe ends when the parent closes it
        inherited.close()
    work_apart()
    with suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            pipe.send(_outcome(work, tasks[pipe.recv()]))


def _outcome(work: Work[Any], task: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, work(*task)
    except BaseException as error:
        if not isinstance(error, UserError):
            error.add_note(f"in process {os.getpid()}:\n{traceback.format_exc()}")
        return False, error
