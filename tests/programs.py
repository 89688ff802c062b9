"""Runs the programs of the tests: ranks as torchrun starts them, and tools as a user does."""

import atexit
import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from typing import Any

import psutil

from tests.warm_python import ask

ROOT = Path(__file__).parents[1]
PATH = (str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
"""Python's path of all programs: that of the tests (`tests.branches` notes by it, another Megatron comes by it)."""
TIME_LIMIT = 1000.0
"""Seconds that a program has."""
GRACE_SECONDS = 10.0
"""What other ranks have to end by themselves once one has failed."""
TIMED_OUT = 124
"""Stands for the exit code of a rank that was still running when its time was up."""
PLAIN, ENGINE = "tests.forkserver", "tests.engine.forkserver"
"""Who forks: a machine without Transformer Engine, or one with its stand-in."""
CARDS, ENGINE_CARDS = "tests.cards.forkserver", "tests.cards.forkserver with engine"
"""The same two with GPUs."""
FOLDERS = {ENGINE: ("tests/engine",), CARDS: ("tests",), ENGINE_CARDS: ("tests", "tests/engine")}
"""What is on Python's path there, before the project."""


owner = os.getpid()
"""The process whose end ends the servers; of several test processes the one that started them, which share a server."""


@functools.cache
def fork_server(module: str) -> Path:
    """The socket of the process that forks for us, which is started when it is needed first."""
    path = warm_python(module)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if answers(path):
            return path
        # By its path: as a module, `tests` would come before it, and Megatron before what it stands in for.
        command = [sys.executable, "-P", "-W", "ignore", f"{module.partition(' ')[0].replace('.', '/')}.py"]
        folders = [*(str(ROOT / folder) for folder in FOLDERS.get(module, ())), *PATH]
        found = environment(module, PYTHONPATH=os.pathsep.join(folders))
        if module == PLAIN and "WARM_PYTHON" in os.environ:  # we are a fork ourselves: so can the server be
            command = [str(ROOT / "tests/warm_python.py"), command[-1]]
            found["WARM_PYTHON"] = os.environ["WARM_PYTHON"]
        nothing = subprocess.DEVNULL
        server = subprocess.Popen(
            [*command, str(path), str(owner)], cwd=ROOT, env=found, stdin=nothing, stdout=nothing, process_group=0
        )
        atexit.register(server.poll)  # and until then it is ours
        while not answers(path):
            assert server.poll() is None, f"{module} does not start"
            time.sleep(0.05)
    return path


def answers(path: Path) -> bool:
    """Whether there is a server at a socket."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def warm_interpreter() -> str:
    """An interpreter for commands of tests: what it is given runs in a fork that has its imports behind it."""
    fork_server(PLAIN)
    return str(ROOT / "tests/warm_python.py")


def warm_python(server: str) -> Path:
    """The socket on which a server serves."""
    return Path(tempfile.gettempdir(), f"warm-python-{server.replace(' ', '-')}-{owner}")


def environment(server: str = PLAIN, **changes: str) -> dict[str, str]:
    """What every program of the tests finds in its environment."""
    warm = {"WARM_PYTHON": str(warm_python(server)), "REAL_PYTHON": sys.executable}
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(PATH), **warm, **changes}


def run_ranks(
    module: str, ranks: int, arguments: Sequence[str], time_limit: float = TIME_LIMIT, server: str = PLAIN
) -> str:
    """Run a module on ranks that find each other as under torchrun; what they printed.

    AssertionError with the stderr of all ranks that failed.
    """
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost",
              "MASTER_PORT": str(free_port())}  # fmt: skip
    environments = [environment(server, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(ranks)]
    codes, stdout, stderr = _run(module, arguments, environments, time_limit, server)
    failed = [
        f"rank {rank} of {module}: {_meaning(code)}\n{stderr[rank][-4000:]}" for rank, code in enumerate(codes) if code
    ]
    assert not failed, "\n".join(failed)
    return "".join(stdout)


def result_of(said: str) -> Any:
    """The object in the one line of what a program printed that starts with RESULT."""
    lines = [line for line in said.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, said[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def run_alone(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a module on one rank, however it ends."""
    words = [str(argument) for argument in arguments]
    alone = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    found = environment(**alone, MASTER_PORT=str(free_port()))
    codes, stdout, stderr = _run(module, words, [found], TIME_LIMIT)
    return subprocess.CompletedProcess([module, *words], codes[0], stdout[0], stderr[0])


def run_tool(
    name: str, *arguments: object, room: str = "tools", server: str = PLAIN
) -> subprocess.CompletedProcess[str]:
    """Run `python tools/name`, or of another `room`, in a process of its own that has the imports behind it."""
    path, words = str(ROOT / room / name), [str(argument) for argument in arguments]
    codes, stdout, stderr = _run(path, words, [environment(server)], TIME_LIMIT, server)
    return subprocess.CompletedProcess([path, *words], codes[0], stdout[0], stderr[0])


def tool(name: str, *arguments: object, check: bool = True, **where: str) -> subprocess.CompletedProcess[str]:
    """`run_tool`, and it must end well."""
    done = run_tool(name, *arguments, **where)
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def fresh_python(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with all of its imports ahead, and their warnings, from the repository."""
    command = [sys.executable, *map(str, words)]
    found = environment(**variables)
    return subprocess.run(command, cwd=ROOT, env=found, capture_output=True, text=True, timeout=1000, check=False)


BEHIND_TORCH = """
import os, sys
import torch
code, *folders = sys.argv[1:]
for folder in folders:
    if not os.fork():
        sys.path.insert(0, folder)
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, folder
"""


def behind_torch(code: str, folders: Iterable[Path]) -> list[str]:
    """Run code once with each folder first on Python's path, with torch alone imported before; the lines it prints."""
    done = fresh_python("-W", "ignore", "-c", BEHIND_TORCH, code, *folders)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """The line with which a program refuses what a user gave it: exit code 2 and no traceback."""
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("error: ")]
    return line


def _run(
    program: str,
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    time_limit: float,
    server: str = PLAIN,
) -> tuple[list[int], list[str], list[str]]:
    """Exit code, stdout and stderr of every rank."""
    path, ranks, ends = str(fork_server(server)), range(len(environments)), (".out", ".err")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as asked:
        clients = []
        for rank in ranks:
            outputs = [asked.enter_context(Path(folder, f"{rank}{end}").open("w")) for end in ends]
            nothing = asked.enter_context(Path(os.devnull).open())
            files = [file.fileno() for file in (nothing, *outputs)]
            client = ask(path, program, arguments, environments[rank], files, kept=not program.endswith(".py"))
            clients.append(asked.enter_context(client))
        codes = _wait(clients, time_limit)
        stdout, stderr = ([Path(folder, f"{rank}{end}").read_text() for rank in ranks] for end in ends)
    return codes, stdout, stderr


def _wait(clients: Sequence[socket.socket], time_limit: float) -> list[int]:
    """Exit codes; a negative one is a signal's. At the limit, or soon after one failed, those that still run say where
    they are, and are killed when their client is closed."""
    codes: dict[socket.socket, int] = {}
    limit = time.monotonic() + time_limit
    while running := [client for client in clients if client not in codes]:
        ended, _, _ = select.select(running, (), (), max(0.0, limit - time.monotonic()))
        if not ended:
            for client in running:
                client.sendall(bytes([signal.SIGUSR1]))  # faulthandler's
                codes[client] = TIMED_OUT
            time.sleep(0.2)
        for client in ended:
            codes[client] = int(client.recv(16))
            if codes[client]:
                limit = min(limit, time.monotonic() + GRACE_SECONDS)
    return [codes[client] for client in clients]


def _meaning(code: int) -> str:
    if code == TIMED_OUT:
        return "still ran when its time was up"
    return f"exit code {code}" if code > 0 else f"killed by signal {-code}"


def runs(pid: int) -> bool:
    """Whether a process runs: one that has ended, and that nobody has asked how, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    """A port that nobody listens on, below those that the system gives away: gloo and torchrun take theirs there."""
    while True:
        port = SystemRandom().randrange(15000, 30000)
        with socket.socket() as candidate:
            if candidate.connect_ex(("localhost", port)):
                return port
