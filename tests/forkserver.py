"""One process imports torch and Megatron once, and forks: a program of the tests starts in milliseconds.

It listens on a socket, where `tests.programs` asks for the ranks of a program and `tests/warm_python.py` for what
programs start as `sys.executable` (the launcher's torchrun, torchrun's ranks).
A fork is a fresh interpreter in all but its imports: nothing that one program does reaches the next, and one that
crashes or hangs is its own client's failure.
"""

import atexit
import contextlib
import copy
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numba
import psutil

from omnibal_ext.launch.processes import descendants
from tests.compiling import compile_in_turn, load_compiled

PRELOADED = (
    *("megatron.vlm.pretrain", "tests.distributed.harness", "omnibal_ext.layout.sweep", "omnibal_ext.packing.build"),
    *("omnibal_ext.report.page", "omnibal_ext.report.trace"),
    *("omnibal_ext.launch.candidates", "omnibal_ext.launch.conversations", "omnibal_ext.launch.reporting"),
    *("omnibal_ext.launch.weights",),
    *("examples.demo.data", "megatron.vlm.preprocessing.preprocess", "megatron.vlm.hf.check"),
    # What those import late:
    *("torch.distributed.run", "megatron.core.models.mimo"),
    *("torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "numba.typed", "rich._emoji_codes"),
)
OF_MANY = ("megatron.core.tokenizers.text.text_tokenizer", "scipy.linalg", "sklearn.datasets", "PIL.ImageDraw")
"""Modules that some programs import, each a second: worth it where hundreds are forked."""
A_CHANGE = 1e-4
"""Seconds that a change of places counts as where a tower is planned beside the pipeline, many times what it takes: no
test of a command looks at how good the plan is."""
GARBAGE = 20_000
"""Objects that a program makes before those in circles are looked for: at 700, Python's own, a tenth of a rank's time.
"""
MADV_COLLAPSE = 25
"""Of <linux/mman.h>."""


@dataclass(frozen=True)
class Job:
    """A program, as in `python -m module` or `python path.py`."""

    program: str
    arguments: Sequence[str]


def main(of_many: bool = False) -> None:
    """Import what programs need, then serve at a socket while a process lives, both named; a fork comes out with its
    job. `of_many`: hundreds of programs will be forked, for which more is made ready."""
    path, owner = sys.argv[1:]
    compile_in_turn()
    for module in (*PRELOADED, *(OF_MANY if of_many else ())):
        importlib.import_module(module)
    warm_up()
    if of_many:
        load_compiled()
    gc.collect()
    gc.freeze()  # or a fork would copy every page that its collector looks at
    gc.set_threshold(GARBAGE)
    if of_many:
        use_large_pages()
    ended = os.pidfd_open(int(owner))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path + ".new")
        listener.listen(64)
        Path(path + ".new").rename(path)
        job = Server(listener, ended).serve()
        if job is None:
            Path(path).unlink()
            os._exit(0)
    become(job)


def warm_up() -> None:
    """Do what programs do first: images and flags' help are made ready to be read, numba to compile. Plans are searched
    for in less time."""
    from megatron.training import arguments, initialize
    from PIL import Image
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from megatron.vlm.flags.parser import add_megatron_arguments
    from omnibal_ext.layout import insertion_search

    insertion_search.A_CHANGE = A_CHANGE
    Image.init()
    numba.njit(lambda: 0)()
    # Megatron makes a parser of its own twice at every start, beside ours: it is made here.
    made = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    arguments.add_megatron_arguments = lambda _: copy.copy(made)
    # Megatron runs its fused functions before it trains, to compile them; nothing compiles them here.
    initialize._warmup_jit_function = lambda **_: None
    share_a_device()
    # torchrun logs the method it is in; torch looks through the files of all modules to find its name.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def share_a_device() -> None:
    """Of all its groups a rank has one thread that looks for messages, a hundred times a second, instead of one each: a
    quarter of the time of ranks."""
    from torch.distributed import ProcessGroupGloo

    device, make = functools.cache(ProcessGroupGloo.create_default_device), ProcessGroupGloo.__init__

    def make_group(group: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [device()], timeout
        make(group, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_group  # type: ignore[assignment, method-assign]


def use_large_pages() -> None:
    """Have the kernel gather our memory in large pages: to fork and to end takes a third of the time."""
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, inode = line.split()[:5]
        if (mode, inode) == ("rw-p", "0"):
            first, end = (int(address, 16) for address in addresses.split("-"))
            libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), MADV_COLLAPSE)


class Server:
    """Forks for every client at a socket until there is something to read from `ended`.

    A client's bytes are signals for its process, which gets its exit code back. When the client is gone, so are the
    process and what it has started.
    """

    def __init__(self, listener: socket.socket, ended: int) -> None:
        self.listener, self.ended = listener, ended
        self.running: dict[int, tuple[int, int, int]] = {}
        """By file descriptor, of the client and of the process: its number, and both."""

    def serve(self) -> Job | None:
        """A job is returned in its fork only."""
        while True:
            files = [self.listener.fileno(), self.ended, *self.running]
            first = select.select(files, [], [])[0][0]
            if first == self.ended:
                for pid, *_ in self.running.values():
                    end_tree(pid)
                return None
            if first in self.running:
                self.hear(first)
            elif job := self.start():
                return job

    def start(self) -> Job | None:
        """Fork for a new client."""
        client, _ = self.listener.accept()
        with client:
            if not (request := receive(client)):
                return None
            if pid := os.fork():
                files = client.detach(), os.pidfd_open(pid)
                self.running |= dict.fromkeys(files, (pid, *files))
                for file in request["files"]:
                    os.close(file)
                return None
            for file in (self.ended, *self.running):
                os.close(file)
        enter(request)
        return Job(request["program"], request["arguments"])

    def hear(self, file: int) -> None:
        """Read from a client, or that its process has ended."""
        pid, client, process = self.running[file]
        if file == client:
            with contextlib.suppress(OSError):
                if numbers := os.read(client, 16):
                    for number in numbers:
                        os.kill(pid, number)
                    return
            end_tree(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            os.write(client, str(code).encode())
        for one in (client, process):
            os.close(one)
            del self.running[one]


def receive(client: socket.socket) -> dict[str, Any]:
    """What a client asks for, and its standard files; nothing where it asks for nothing."""
    size, files, *_ = socket.recv_fds(client, 8, 3)
    if not size:
        return {}
    request: dict[str, Any] = json.loads(client.recv(int(size), socket.MSG_WAITALL))
    if request["kept"]:  # the next fork has it
        with contextlib.suppress(Exception):  # this one, which imports it again, says what is wrong
            importlib.import_module(request["program"])
    assert sum(1 for _ in Path("/proc/self/task").iterdir()) == 1, "a fork would lack the other threads"
    return {**request, "files": files}


def end_tree(pid: int) -> None:
    """Kill a process and all that it has started."""
    below = descendants(pid)
    os.kill(pid, signal.SIGKILL)
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def enter(request: Mapping[str, Any]) -> None:
    """Make this fork a process of its own: its group, folder, environment and standard files."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, file in enumerate(request["files"]):
        os.dup2(file, number)
        os.close(file)
    sys.executable = str(Path(__file__).with_name("warm_python.py"))
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def become(job: Job) -> NoReturn:
    """Run the program as Python would, and end at once: to take Megatron's modules apart would take a second."""
    sys.argv, code = [job.program, *job.arguments], 0
    try:
        if job.program.endswith(".py"):
            sys.path.insert(0, str(Path(job.program).resolve().parent))
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


if __name__ == "__main__":
    main(of_many=True)
