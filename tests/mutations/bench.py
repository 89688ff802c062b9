"""Plants faults in copies of the repository and runs tests there, each time in a fork that has imported torch.

Nothing here imports our own code: forks import it, with the fault in it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import numba
import psutil
import pytest
from faults import ROOT, Fault
from hypothesis import Phase, settings

for _module in (
    "numba.typed",
    "scipy.optimize",
    "torch.utils.tensorboard",
    "transformers.models.auto",
    "sklearn.datasets",
):
    import_module(_module)

DIED, SURVIVED, SLOW, UNFIT, BROKEN = "died", "survived", "ran out of time", "fits no more", "cannot run its tests"
FATES = {0: SURVIVED, 1: DIED, 2: DIED}
"""Of pytest's exit codes; 2 is a file of tests that cannot be imported."""
_times = count(int(time.time()))


@dataclass(frozen=True)
class Trial:
    """What became of a fault."""

    fault: Fault
    fate: str
    seconds: float
    test: str
    """The test that was begun last: that which failed, or hung."""
    said: str


@dataclass(frozen=True)
class _Run:
    """Tests that run in a copy with a fault in it."""

    fault: Fault
    copy: Path
    folder: Path
    """What they write: `test`, `said`, and what numba compiles."""
    clean: bytes
    stat: os.stat_result
    started: float
    process: psutil.Process


class Bench:
    """Copies of the repository, in which so many faults are tried at once; a context that removes them."""

    def __init__(self, workers: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mutations.")
        self._free = [_copy(Path(self._folder.name, str(number))) for number in range(workers)]
        self._running: list[_Run] = []

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *_: object) -> None:
        for run in self._running:
            _kill(run.process)
        self._folder.cleanup()

    def try_all(self, faults: Sequence[Fault], limit: float, until: float = float("inf")) -> Iterator[Trial]:
        """Trials in the order in which they end, each of `limit` seconds; none begins after `until`."""
        waiting = list(reversed(faults))
        while self._running or (waiting and time.monotonic() < until):
            while waiting and self._free and time.monotonic() < until:
                try:
                    self._start(waiting.pop())
                except ValueError as error:
                    yield Trial(error.args[1], UNFIT, 0.0, "", error.args[0])
            time.sleep(0.05)
            for run in list(self._running):
                spent = time.monotonic() - run.started
                pid, status = os.waitpid(run.process.pid, os.WNOHANG)
                if pid or spent > limit:
                    fate = FATES.get(os.waitstatus_to_exitcode(status), BROKEN) if pid else SLOW
                    yield self._end(run, fate, spent)

    def _start(self, fault: Fault) -> None:
        copy = self._free[-1]
        path = copy / fault.file
        clean, stat = path.read_bytes(), path.stat()
        try:
            path.write_text(fault.plant(clean.decode()), encoding="utf-8")
        except ValueError as error:
            raise ValueError(str(error), fault) from None
        # Of a time that no other had: what Python has compiled of a file is known by its seconds and its size.
        os.utime(path, (next(_times),) * 2)
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        sys.stdout.flush()
        if not (pid := os.fork()):
            _run_tests(copy, folder, fault)
        self._free.pop()
        self._running.append(_Run(fault, copy, folder, clean, stat, time.monotonic(), psutil.Process(pid)))

    def _end(self, run: _Run, fate: str, seconds: float) -> Trial:
        """Take the fault out again."""
        self._running.remove(run)
        if fate == SLOW:
            _kill(run.process)
        path = run.copy / run.fault.file
        path.write_bytes(run.clean)
        os.utime(path, ns=(run.stat.st_atime_ns, run.stat.st_mtime_ns))  # what was compiled of it is good again
        test, said = ((run.folder / name).read_text(errors="replace") for name in ("test", "said"))
        shutil.rmtree(run.folder)
        self._free.append(run.copy)
        return Trial(run.fault, fate, seconds, test or run.fault.tests[0], said)


class _Begun:
    """A pytest plugin that writes down which test was begun last: with -x the one that saw a fault."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.path.write_text(nodeid, encoding="utf-8")


def _run_tests(copy: Path, folder: Path, fault: Fault) -> NoReturn:
    """In a fork: run the fault's tests in the copy, up to the first that fails."""
    code = 3
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        (folder / "test").touch()
        for number in (1, 2):
            os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        os.chdir(copy)
        sys.path[0] = os.environ["PYTHONPATH"] = str(copy)  # in the place of this folder
        sys.modules["__main__"] = ModuleType("__main__")  # which processes that tests spawn would import
        os.environ["OMP_NUM_THREADS"] = "1"
        if _is_compiled_into(fault.file, copy):
            numba.config.CACHE_DIR = os.environ["NUMBA_CACHE_DIR"] = str(folder / "numba")
        # An example that fails is enough, it need not be the smallest one.
        settings.register_profile("quick", settings.default, phases=(Phase.explicit, Phase.reuse, Phase.generate))
        settings.load_profile("quick")
        code = pytest.main(["-x", "-p", "no:cacheprovider", *fault.tests], plugins=[_Begun(folder / "test")])
        sys.stdout.flush()
    finally:
        os._exit(code)


def _is_compiled_into(file: str, copy: Path) -> bool:
    """Whether numba compiles functions of the file, or others' that may have its own, or its constants, in them.

    It compiles a function again when the function's own file has changed, not when one has that it calls.
    """
    words = f"from {file.removesuffix('.py').replace('/', '.')} import"
    texts = {path: path.read_text(encoding="utf-8") for path in (copy / "omnibal_ext").rglob("*.py")}
    return any("njit" in text and (path == copy / file or words in text) for path, text in texts.items())


def _copy(target: Path) -> Path:
    """What git knows and would add, and what is compiled of it; with its times, so that it is not compiled again."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    compiled = [str(path.relative_to(ROOT)) for path in (ROOT / "omnibal_ext").rglob("__pycache__/*")]
    for name in filter(None, [*listed, *compiled]):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def _kill(process: psutil.Process) -> None:
    """With all that it has started, in whatever group of processes."""
    for one in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process.pid, 0)
