"""Plants faults, one at a time in a copy of the repository, and runs the tests that are to see them.

    bash scripts/mutate.sh [NAME...]              all faults, or those named
    bash scripts/mutate.sh --file FAULTS.jsonl    files new ones: a line {"name", "file", "old", "new", "test", "fault"}

1. The nearest tests must pass on the clean tree.
2. Each fault is planted in a copy and its tests run with `-x -q`: a test that fails, or hangs, kills it.
3. Nothing may survive; a patch that fits no more, or tests that cannot be collected, is an error of the list itself.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from faults import Fault, all_faults, write_fault

from omnibal_ext.console import print_table
from omnibal_ext.errors import UserError, run_tool

ROOT = Path(__file__).parents[2]
WORKERS = 2
TIME_LIMIT = 900.0
"""Seconds that the nearest tests of a fault have."""
KILLED, HUNG, SURVIVED = "killed", "killed (hung)", "survived"


@dataclass(frozen=True)
class Verdict:
    """What became of a fault."""

    fault: Fault
    fate: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant; none: all")
    parser.add_argument("--file", type=Path, metavar="FAULTS.jsonl", help="file these faults instead")
    arguments = parser.parse_args()
    if arguments.file:
        for line in arguments.file.read_text(encoding="utf-8").splitlines():
            print(write_fault(ROOT, json.loads(line)).relative_to(ROOT))
        return
    faults = _chosen(arguments.names)
    with tempfile.TemporaryDirectory(prefix="mutations.") as folder:
        copies = [_copy(Path(folder) / str(number)) for number in range(WORKERS)]
        _check_clean(faults, copies[0])
        verdicts = _judge(faults, copies)
    rows = [(verdict.fault.name, verdict.fate, f"{verdict.seconds:.0f}") for verdict in verdicts]
    print_table("faults", ("fault", "fate", "seconds"), rows)
    survived = sum(verdict.fate == SURVIVED for verdict in verdicts)
    print(f"{survived} survived of {len(verdicts)}")
    sys.exit(bool(survived))


def _chosen(names: Sequence[str]) -> list[Fault]:
    known = {fault.name: fault for fault in all_faults()}
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"no fault {unknown[0]!r} in tests/mutations")
    return [known[name] for name in names] or list(known.values())


def _copy(target: Path) -> Path:
    """What git knows and would add, with its times, so that what was compiled before is not compiled again."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def _check_clean(faults: Sequence[Fault], copy: Path) -> None:
    tests = sorted({path for fault in faults for path in fault.paths})
    print(f"{len(tests)} nearest tests on the clean tree ...", flush=True)
    shared = [*tests, "-n", str(WORKERS), "--dist", "loadfile"]
    code = _pytest(copy, shared, copy / ".numba", len(tests) * TIME_LIMIT, shown=True)
    if code != 0:
        raise UserError(f"the nearest tests fail without any fault (pytest's exit code {code}); mend them first")


def _judge(faults: Sequence[Fault], copies: Sequence[Path]) -> list[Verdict]:
    """Verdicts in the order of the faults; each is printed when it is known."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for copy in copies:
        free.put(copy)
    with ThreadPoolExecutor(len(copies)) as pool:
        futures = {pool.submit(_try, fault, free): fault.name for fault in faults}
        found = {}
        for future in as_completed(futures):
            verdict = future.result()
            found[verdict.fault.name] = verdict
            print(
                f"{len(found):4}/{len(faults)}  {verdict.fate:13} {verdict.seconds:6.0f} s  {verdict.fault.name}",
                flush=True,
            )
    return [found[fault.name] for fault in faults]


def _try(fault: Fault, free: "queue.SimpleQueue[Path]") -> Verdict:
    copy, started = free.get(), time.monotonic()
    try:
        with _planted(fault, copy), tempfile.TemporaryDirectory(prefix="numba.") as own:
            # Numba does not see that a function another file calls has changed.
            compiles = "njit" in (copy / fault.file).read_text(encoding="utf-8")
            code = _pytest(copy, [*fault.tests, "-x"], Path(own) if compiles else copy / ".numba", TIME_LIMIT)
    finally:
        free.put(copy)
    fates = {0: SURVIVED, 1: KILLED, None: HUNG}
    if code not in fates:
        raise UserError(f"{fault.path}: pytest cannot run {' '.join(fault.tests)} with it (exit code {code})")
    return Verdict(fault, fates[code], time.monotonic() - started)


@contextmanager
def _planted(fault: Fault, copy: Path) -> Iterator[None]:
    path = copy / fault.file
    clean, times = path.read_bytes(), path.stat()
    fault.plant(copy)
    try:
        yield
    finally:
        path.write_bytes(clean)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # what was compiled of it is good again


def _pytest(copy: Path, arguments: Sequence[str], numba: Path, limit: float, shown: bool = False) -> int | None:
    """Pytest's exit code in a copy, None if it had to be ended; what it says is `shown` or dropped."""
    paths = f"{copy}{os.pathsep}{Path(__file__).parent}"
    environment = {**os.environ, "PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(numba), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no_shrinking", *arguments]
    output = None if shown else subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=copy, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


if __name__ == "__main__":
    run_tool(main)
