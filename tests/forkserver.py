"""One process imports torch and Megatron once, and forks: a program of the tests starts in milliseconds.

The server reads one job a line from stdin, forks a process for every rank of it, and answers on stdout how they ended;
`tests.programs` is the other end. What those programs start as `sys.executable` (the launcher's torchrun, torchrun's
ranks) is forked too: a twin of the server serves `tests/warm_python.py` on a socket.
A fork is a fresh interpreter in all but its imports: nothing that one program does reaches the next, and one that
crashes or hangs is its own job's failure.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numba
import psutil

from omnibal_ext.launch.processes import descendants
from tests.compiling import compile_in_turn

PRELOADED = (
    *("megatron.vlm.pretrain", "tests.distributed.harness", "omnibal_ext.layout.sweep", "omnibal_ext.packing.build"),
    *("omnibal_ext.report.page", "omnibal_ext.report.picture", "omnibal_ext.report.trace"),
    *("omnibal_ext.launch.candidates", "omnibal_ext.launch.conversations", "omnibal_ext.launch.reporting"),
    *("omnibal_ext.launch.weights",),
    *("examples.demo.data", "megatron.vlm.preprocessing.preprocess", "megatron.vlm.hf.check"),
    # What those import late:
    *("torch.distributed.run", "megatron.core.tokenizers.text.text_tokenizer", "megatron.core.models.mimo"),
    *("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "megatron.core.tokenizers.text.models"),
    *("numba.typed", "scipy.linalg", "sklearn.datasets", "PIL.ImageDraw", "rich._emoji_codes"),
)
A_CHANGE = 1e-4
"""Seconds that a change of places counts as where a tower is planned beside the pipeline, many times what it takes: no
test of a command looks at how good the plan is."""
GARBAGE = 20_000
"""Objects that a program makes before those in circles are looked for: at 700, Python's own, a tenth of a rank's time.
"""
GRACE_SECONDS = 10.0
"""What other ranks have to end by themselves once one has failed."""
TIMED_OUT = 124
"""Exit code of a rank that was still running when its time was up."""


@dataclass(frozen=True)
class Job:
    """A program, as in `python -m module` or `python path.py`, on ranks that differ in their environment alone."""

    program: str
    arguments: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    """One a rank."""
    outputs: Sequence[str]
    """One a rank: the file that its stdout goes to; its stderr goes to the file beside it that ends with `.err`."""
    time_limit: float
    """Seconds."""


def main() -> None:
    """Import what programs need, then serve, and interpreters at the socket named; a fork comes out with its job."""
    compile_in_turn()
    for module in PRELOADED:
        importlib.import_module(module)
    warm_up()
    gc.collect()
    gc.freeze()  # or a fork would copy every page that its collector looks at
    gc.set_threshold(GARBAGE)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    ended, ends_with_us = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        if not os.fork():
            os.close(ends_with_us)
            become(serve_interpreters(listener, ended))
    if job := serve():
        become(job)


def warm_up() -> None:
    """Do what programs do first: images and flags' help are made ready to be read, numba to compile. Plans are searched
    for in less time."""
    from PIL import Image
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from megatron.vlm.flags.parser import add_megatron_arguments
    from omnibal_ext.layout import place_search

    place_search.A_CHANGE = A_CHANGE
    Image.init()
    numba.njit(lambda: 0)()
    add_megatron_arguments(ArgumentParser())
    # torchrun logs the method it is in; torch looks through the files of all modules to find its name.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def serve() -> Job | None:
    """Fork a process for every rank of every job until stdin ends; a job is returned in its forks only."""
    for line in sys.stdin:
        job = Job(**json.loads(line))
        if not job.program.endswith(".py"):
            with contextlib.suppress(Exception):  # the fork, which imports it again, says what is wrong
                importlib.import_module(job.program)
        assert sum(1 for _ in Path("/proc/self/task").iterdir()) == 1, "a fork would lack the other threads"
        ranks: dict[int, int] = {}
        for rank in range(len(job.outputs)):
            pid = os.fork()
            if not pid:
                path = job.outputs[rank]
                write = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
                files = os.open(os.devnull, os.O_RDONLY), os.open(path, write), os.open(path + ".err", write)
                enter(job.environments[rank], files)
                return job
            os.setpgid(pid, pid)
            ranks[pid] = rank
        codes = wait(ranks, job.time_limit)
        print(json.dumps([codes[pid] for pid in ranks]), flush=True)
    return None


def serve_interpreters(listener: socket.socket, ended: int) -> Job:
    """Fork for every `tests/warm_python.py` that connects, until there is something to read from the pipe `ended`.

    A job is returned in its fork only.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who keep a client
    while ended not in select.select([listener, ended], [], [])[0]:
        client, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return keep(client)
        client.close()
    os._exit(0)


def keep(client: socket.socket) -> Job:
    """Fork the process that a client asks for; hand it the client's signals, and the client its exit code.

    When the client is gone, so are the process and what it has started.
    """
    _, files, *_ = socket.recv_fds(client, 1, 3)
    request = json.loads(b"".join(iter(lambda: client.recv(1), b"\n")))
    if not (pid := os.fork()):
        client.close()
        os.chdir(request["folder"])
        enter(request["environment"], files)
        return Job(request["program"], request["arguments"], (), (), 0.0)
    process = os.pidfd_open(pid)
    while process not in select.select([client, process], [], [])[0]:
        numbers = client.recv(16)
        for number in numbers:
            os.kill(pid, number)
        if not numbers:
            end_tree(pid)
            os._exit(0)
    with contextlib.suppress(OSError):
        client.sendall(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def end_tree(pid: int) -> None:
    """Kill a process and all that it has started."""
    below = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def enter(environment: Mapping[str, str], files: Sequence[int]) -> None:
    """Make this fork a process of its own: its group, environment and standard files."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.executable = str(Path(__file__).with_name("warm_python.py"))
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def become(job: Job) -> NoReturn:
    """Run the program as Python would, and end at once: to take Megatron's modules apart would take a second."""
    sys.argv, code = [job.program, *job.arguments], 0
    try:
        if job.program.endswith(".py"):
            runpy.run_path(job.program, run_name="__main__")
        else:
            runpy.run_module(job.program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    with contextlib.suppress(ValueError):  # closed by the program
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def wait(processes: Iterable[int], time_limit: float) -> dict[int, int]:
    """Exit codes; at the limit, or soon after one failed, those that still run say where they are and are killed."""
    codes: dict[int, int] = {}
    running, limit = set(processes), time.monotonic() + time_limit
    try:
        while running and time.monotonic() < limit:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                time.sleep(0.005)
                continue
            running.remove(pid)
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid]:
                limit = min(limit, time.monotonic() + GRACE_SECONDS)
        for pid in running:
            os.kill(pid, signal.SIGUSR1)  # faulthandler's
            time.sleep(0.2)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return codes | dict.fromkeys(running, TIMED_OUT)


if __name__ == "__main__":
    main()
