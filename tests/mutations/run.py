"""Plants faults, one at a time in a copy of the repository, and runs the tests that are to see them.

    bash scripts/mutate.sh [NAME...]              all faults, or those named
    bash scripts/mutate.sh --sample 12 --seed 3   some of them
    bash scripts/mutate.sh --file FAULTS.jsonl    files new ones: a line {"name", "file", "old", "new", "test", "fault"}

1. Each fault is planted in a copy. The test that saw it last runs first; if it passes, all of the nearest, up to the
   first that fails. A test that fails, or hangs, kills it.
2. Tests run in forks of a process that has imported what our code imports of others, see `warm.py`.
3. Every test that killed must pass in a copy without a fault.
4. What saw a fault is noted in its patch, but for samples.
5. Nothing may survive; nor may a patch fit no more, or tests be there that cannot be run.
"""

import argparse
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import compiled
from faults import Fault, all_faults, write_fault

from omnibal_ext.console import print_table
from omnibal_ext.errors import UserError, run_tool

ROOT = Path(__file__).parents[2]
WORKERS = 3
"""For two cores: while the tests of one wait for their ranks, others work."""
TIME_LIMIT = 900.0
"""Seconds that the nearest tests of a fault have."""
KILLED, HUNG, SURVIVED, UNFIT = "killed", "killed (hung)", "survived", "fits no more"
FATES = {0: SURVIVED, 1: KILLED, None: HUNG}
PASSED, FAILED, INTERRUPTED = 0, 1, 2
"""Pytest's exit codes; above these it ran no test."""
_times = count(1)


@dataclass(frozen=True)
class Verdict:
    """What became of a fault."""

    fault: Fault
    fate: str
    seconds: float
    seen_by: str = ""
    """The test that failed, or hung."""

    @property
    def killed(self) -> bool:
        return self.fate in (KILLED, HUNG)


@dataclass(frozen=True)
class Bench:
    """Where faults are planted: copies of the repository that are free, and a process that forks Pythons."""

    folder: Path
    copies: "queue.SimpleQueue[Path]" = field(default_factory=queue.SimpleQueue)

    @property
    def socket(self) -> Path:
        """Where the process listens."""
        return self.folder / "warm"

    @contextmanager
    def copy(self) -> Iterator[Path]:
        """One of the copies, for a while."""
        copy = self.copies.get()
        try:
            yield copy
        finally:
            self.copies.put(copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant; none: all")
    parser.add_argument("--sample", type=int, metavar="N", help="plant so many of them, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path, metavar="FAULTS.jsonl", help="file these faults instead")
    arguments = parser.parse_args()
    if arguments.file:
        for line in arguments.file.read_text(encoding="utf-8").splitlines():
            print(write_fault(ROOT, json.loads(line)).relative_to(ROOT))
        return
    faults = _chosen(arguments.names)
    if arguments.sample is not None:
        faults = random.Random(arguments.seed).sample(faults, min(arguments.sample, len(faults)))
    with _bench() as bench:
        verdicts = _judge(faults, bench)
        _check_clean(verdicts, bench)
    for verdict in verdicts if arguments.sample is None else ():
        if verdict.killed and verdict.seen_by != verdict.fault.seen_by:
            verdict.fault.note(verdict.seen_by)
    rows = [(verdict.fault.name, verdict.fate, f"{verdict.seconds:.0f}") for verdict in verdicts]
    print_table("faults", ("fault", "fate", "seconds"), rows)
    survived = sum(not verdict.killed for verdict in verdicts)
    print(f"{survived} survived of {len(verdicts)}")
    sys.exit(bool(survived))


def _chosen(names: Sequence[str]) -> list[Fault]:
    known = {fault.name: fault for fault in all_faults()}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"no fault {unknown[0]!r} in tests/mutations")
    return [known[name] for name in names] or list(known.values())


@contextmanager
def _bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="mutations.") as folder:
        bench = Bench(Path(folder))
        command = [sys.executable, "-P", "-W", "ignore", str(Path(__file__).with_name("warm.py")), str(bench.socket)]
        warm = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE
        )  # it ends with its stdin
        for number in range(WORKERS):
            bench.copies.put(_copy(bench.folder / str(number)))
        while not bench.socket.exists():
            if warm.poll() is not None:
                raise RuntimeError("tests/mutations/warm.py does not start")
            time.sleep(0.1)
        try:
            yield bench
        finally:
            warm.terminate()
            warm.wait()


def _copy(target: Path) -> Path:
    """What git knows and would add, and what is compiled of it; with its times, so that it is not compiled again."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    compiled_files = [str(path.relative_to(ROOT)) for path in (ROOT / "omnibal_ext").rglob("__pycache__/*")]
    for name in filter(None, [*listed.stdout.split("\0"), *compiled_files]):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def _judge(faults: Sequence[Fault], bench: Bench) -> list[Verdict]:
    """Verdicts in the order of the faults; each is printed when it is known."""
    with ThreadPoolExecutor(WORKERS) as pool:
        futures = [pool.submit(_try, fault, bench) for fault in faults]
        for number, future in enumerate(as_completed(futures), start=1):
            verdict = future.result()
            told = f"{number:4}/{len(faults)}  {verdict.fate:13} {verdict.seconds:6.0f} s  {verdict.fault.name}"
            print(f"{told}  ({verdict.seen_by})" if verdict.seen_by else told, flush=True)
        return [future.result() for future in futures]


def _try(fault: Fault, bench: Bench) -> Verdict:
    with bench.copy() as copy, tempfile.TemporaryDirectory(dir=bench.folder) as aside:
        started = time.monotonic()
        try:
            with _planted(fault, copy), compiled.put_aside(fault.file, copy, Path(aside)):
                code: int | None = PASSED
                for tests in filter(None, ((fault.seen_by,) * bool(fault.seen_by), fault.tests)):
                    code, last = _pytest(copy, [*tests, "-x"], bench.socket)
                    if code in (FAILED, None):
                        return Verdict(fault, FATES[code], time.monotonic() - started, last)
        except UserError as error:
            print(error, file=sys.stderr)
            return Verdict(fault, UNFIT, time.monotonic() - started)
        return Verdict(fault, FATES.get(code, f"cannot run ({code})"), time.monotonic() - started)


def _check_clean(verdicts: Sequence[Verdict], bench: Bench) -> None:
    """Raise UserError if a test that saw a fault fails without any."""
    files: dict[str, set[str]] = {}
    for verdict in verdicts:
        if verdict.killed:
            files.setdefault(verdict.seen_by.partition("::")[0], set()).add(verdict.seen_by)
    print(f"{sum(map(len, files.values()))} tests that saw them, without a fault ...", flush=True)
    names = sorted(files)
    shares = [[test for name in names[first::WORKERS] for test in sorted(files[name])] for first in range(WORKERS)]

    def run(tests: Sequence[str]) -> int | None:
        with bench.copy() as copy:
            return _pytest(copy, tests, bench.socket, len(tests) * TIME_LIMIT, shown=True)[0]

    with ThreadPoolExecutor(WORKERS) as pool:
        codes = list(pool.map(run, filter(None, shares)))
    if any(codes):
        raise UserError(f"nearest tests fail without any fault (pytest's exit codes {codes}); mend them first")


@contextmanager
def _planted(fault: Fault, copy: Path) -> Iterator[None]:
    path = copy / fault.file
    clean, times = path.read_bytes(), path.stat()
    fault.plant(copy)
    # Of a time that no other had: what is compiled of a file is known by its seconds and its size.
    os.utime(path, (times.st_mtime + next(_times),) * 2)
    try:
        yield
    finally:
        path.write_bytes(clean)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # what was compiled of it is good again


def _pytest(
    copy: Path,
    arguments: Sequence[str],
    warm: Path,
    limit: float = TIME_LIMIT,
    shown: bool = False,
) -> tuple[int | None, str]:
    """Pytest's exit code in a copy, None if it had to be ended, and the test that was begun last.

    In a fork of the process at the socket `warm`. What it says is `shown` if it fails.
    """
    paths = f"{copy}{os.pathsep}{copy / 'tests/mutations'}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    environment |= {"PYTHONPATH": paths, "WARM_PYTHON": str(warm), "REAL_PYTHON": sys.executable}
    command = [str(copy / "tests/warm_python.py"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "planted"]
    command += arguments
    with tempfile.TemporaryDirectory(prefix="pytest.") as folder:
        last, said = Path(folder, "last"), Path(folder, "said")
        last.touch()
        with said.open("w") as output:
            process = subprocess.Popen(
                command, cwd=copy, env=environment | {"LAST_TEST": str(last)}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if code != PASSED and (shown or code not in FATES):
            print(said.read_text(errors="replace")[-4000:], file=sys.stderr)
        return code, last.read_text(encoding="utf-8")


if __name__ == "__main__":
    run_tool(main)
