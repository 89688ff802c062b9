"""Damaged and made-up files for every reader: each must be read, or refused in one line.

    python -m tests.fuzz [--inputs 100000] [--engine hypothesis|atheris] [--seed 0] [READER...]

Anything else is a finding: an exception that no document names, five seconds of computing or a minute of waiting
without an answer, or more than 512 MiB beyond what the program had. The engine draws strings of choices (`mutate.py`);
atheris looks for those that reach new lines of ours. Prints a table, and ends with 1 if anything was found.
"""

import argparse
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from megatron.vlm.data.rejects import Rejected
from omnibal_ext.console import print_table
from omnibal_ext.errors import UserError
from tests.fuzz.mutate import Choices, damaged
from tests.fuzz.reader import Reader
from tests.fuzz.readers import all_readers

TIMERS = {signal.ITIMER_PROF: 5.0, signal.ITIMER_REAL: 60.0}
"""Seconds of computing, and of waiting."""
MEMORY, MOST_CHOICES = 2**29, 96


class Hang(BaseException):
    """No answer in time."""


@dataclass
class Trial:
    name: str
    reader: Reader
    folder: Path
    fates: Counter[str] = field(default_factory=Counter)
    found: dict[str, bytes] = field(default_factory=dict)
    """Where an undocumented exception was raised -> the choices that lead there."""

    def __call__(self, content: bytes) -> None:
        choices = Choices(content)
        name = choices.one(sorted(self.reader.files))
        for other, whole in self.reader.files.items():
            (self.folder / other).write_bytes(damaged(other, whole, choices) if other == name else whole)
        if choices.below(2):
            self.reader.mend(self.folder)
        _set_timers(1)
        try:
            self.reader.read(self.folder)
            self.fates["read"] += 1
        except (UserError, Rejected) as refusal:
            self._refused(refusal, content)
        except (Exception, Hang) as error:
            self._finding(error, content)
        finally:
            _set_timers(0)

    def _refused(self, refusal: Exception, content: bytes) -> None:
        self.fates["refused"] += 1
        message = str(refusal)
        if isinstance(refusal, UserError) and not (message.isprintable() and len(message) < 2000):
            self._finding(AssertionError(f"{len(message)} characters, no line: {message[:200]!r}"), content)

    def _finding(self, error: BaseException, content: bytes) -> None:
        self.fates["undocumented"] += 1
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        self.found.setdefault(f"{type(error).__name__} at {' < '.join(frames[-3:][::-1])}: {str(error)[:120]}", content)


def main() -> None:
    arguments = _parser().parse_args()
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, _hang)
    with tempfile.TemporaryDirectory(prefix="fuzz.") as scratch:
        readers = all_readers(Path(scratch))
        wanted = arguments.readers or list(readers)
        each = -(-arguments.inputs // len(wanted))
        _limit_memory()
        if arguments.engine == "atheris":
            trial = Trial(wanted[0], readers[wanted[0]], _fresh(Path(scratch) / "read"))
            _atheris(trial, each, arguments.seed)
            return
        trials = [Trial(name, readers[name], _fresh(Path(scratch) / f"read-{name}")) for name in wanted]
        started = time.perf_counter()
        for trial in trials:
            _hypothesis(trial, each, arguments.seed)
        _report(trials, time.perf_counter() - started)
    sys.exit(1 if any(trial.found for trial in trials) else 0)


def _hypothesis(trial: Callable[[bytes], None], inputs: int, seed: int) -> None:
    checks = list(HealthCheck)

    @seeded(seed)
    @settings(max_examples=inputs, deadline=None, database=None, suppress_health_check=checks)
    @given(st.binary(max_size=MOST_CHOICES))
    def run(content: bytes) -> None:
        trial(content)

    run()


def _atheris(trial: Trial, inputs: int, seed: int) -> None:
    import atheris

    def run(content: bytes) -> None:
        before = len(trial.found)
        trial(content)
        if len(trial.found) > before:
            raise RuntimeError(list(trial.found)[-1])

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-runs={inputs}", f"-seed={seed + 1}", f"-max_len={MOST_CHOICES}"], run)
    atheris.Fuzz()


def _limit_memory() -> None:
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.RLIM_INFINITY))


def _hang(*_: object) -> None:
    raise Hang("no answer")


def _set_timers(times: int) -> None:
    for timer, seconds in TIMERS.items():
        signal.setitimer(timer, times * seconds)


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _report(trials: list[Trial], seconds: float) -> None:
    for trial in trials:
        for finding, content in trial.found.items():
            print(f"{trial.name}: {finding}\n    choices {content.hex()}")
    fates = ("read", "refused", "undocumented")
    rows = [(trial.name, sum(trial.fates.values()), *(trial.fates[fate] for fate in fates)) for trial in trials]
    rows.append(("all", *(sum(int(row[column]) for row in rows) for column in range(1, 5))))
    print_table(f"Damaged files, {seconds:.0f} s", ("reader", "inputs", *fates), rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", metavar="READER", help="which; none: all")
    parser.add_argument("--inputs", type=int, default=100_000, help="of all readers together")
    parser.add_argument("--engine", choices=("hypothesis", "atheris"), default="hypothesis")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
