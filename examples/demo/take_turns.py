"""Train several runs, one at a time: each goes on for two seconds while the others stand still, in turns.

    python examples/demo/take_turns.py < COMMANDS

COMMANDS: for each run a line, its command of omnibal launch with `--progress` and `--log-interval 1`. What else the
machine does falls on all of them alike, so that examples/demo/compare.py can compare their seconds. A run's turns are
noted in its folder, in turns.jsonl; what its launcher says on stderr is in launch.err.
"""

import argparse
import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.flags import ToolParser, flag_value
from omnibal_ext.launch.folder import METRICS
from omnibal_ext.launch.processes import SIGNALS, descendants, end_tree, kill_with_this_process, stoppable
from omnibal_ext.reading.checks import finite, integer, listing, record
from omnibal_ext.reading.document import read_lines
from omnibal_ext.run_metrics import complete_lines

SECONDS, ITERATIONS = 2.0, 3
"""Least length of a turn. Its first iteration was begun in another turn."""
TURNS, ERRORS = "turns.jsonl", "launch.err"


@dataclass(frozen=True)
class Turn:
    """One turn of a run."""

    round: int
    seconds: list[float]
    """Of each iteration that began and ended in it."""
    processor_seconds: float
    """Of all the run's processes, an iteration."""
    others: float
    """Share of the machine's processors that other programs had."""


TURN = record(
    {"round": integer(), "seconds": listing(finite(0), 1), "processor_seconds": finite(0), "others": finite(0)}
)
"""The schema of a line of turns.jsonl."""


def turns_of(folder: Path) -> list[Turn]:
    """The turns of a run; none without a file. Raises UserError for a line that is none."""
    path = folder / TURNS
    return [Turn(**line) for line in read_lines(path, TURN, f"remove {path}")] if path.exists() else []


def main() -> None:
    """Start the runs one after the other, and let them take turns until all have ended."""
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    commands = [shlex.split(line) for line in sys.stdin]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"))
    console = Console(stderr=True)
    with stoppable(), Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        runs: list[Run] = []
        try:
            for command in commands:
                runs.append(Run(command, bars))
                runs[-1].have_turn(0, alone=False)
            number = max((turn.round for run in runs for turn in turns_of(run.folder)), default=0)
            while going := [run for run in runs if run.is_going()]:
                check_ends(runs)  # before the last one left goes on to its end
                number += 1
                for run in going:
                    run.have_turn(number, alone=len(going) == 1)
            check_ends(runs)
        except BaseException:
            for run in runs:
                run.end()
            end_tree()
            raise


def check_ends(runs: Sequence["Run"]) -> None:
    """Raise UserError if one has failed: it may have ended between its turns, and the others would go on for long."""
    for run in runs:
        run.check_end()


class Run:
    """A run that its launcher has started, and that stands still between its turns."""

    def __init__(self, command: Sequence[str], bars: Progress) -> None:
        folder = flag_value("--run-dir", command)
        if folder is None:
            raise UserError(f"{shlex.join(command)}: has no --run-dir")
        self.folder, self.bars = Path(folder), bars
        self.folder.mkdir(parents=True, exist_ok=True)
        self.position = metrics.stat().st_size if (metrics := self.folder / METRICS).exists() else 0
        self.bar = bars.add_task(self.folder.name, total=None, loss="starting")
        with (self.folder / ERRORS).open("w") as errors:
            self.launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stderr=errors,
                preexec_fn=kill_with_this_process(),  # noqa: PLW1509  # no lock that it takes is held
            )

    def is_going(self) -> bool:
        """Whether it has not ended."""
        return self.launcher.poll() is None

    def have_turn(self, number: int, alone: bool) -> None:
        """Let it go on for a turn and note it; `alone`: to its end. Turn 0 is the start, and not noted.

        Raises UserError if it fails.
        """
        self._send(signal.SIGCONT)
        begin, spent, busy = time.monotonic(), self._processor_seconds(), _busy_seconds()
        seconds: list[float] = []
        while self.is_going() and (alone or len(seconds) < ITERATIONS or time.monotonic() < begin + SECONDS):
            time.sleep(0.02)
            seconds += self._new_iterations()
            if number == 0 and seconds:
                break
        spent, busy = self._processor_seconds() - spent, _busy_seconds() - busy
        passed = (time.monotonic() - begin) * (psutil.cpu_count() or 1)
        if not self.is_going():
            self.check_end()
            return
        self._send(signal.SIGSTOP)
        if number > 0:
            others = max(0.0, busy - spent) / passed
            turn = Turn(number, seconds[1:], spent / len(seconds), others)
            with (self.folder / TURNS).open("a") as file:
                file.write(json.dumps(asdict(turn)) + "\n")

    def check_end(self) -> None:
        """Raise UserError if it has failed."""
        if code := self.launcher.poll():
            raise UserError(f"{self.folder}: ended with exit code {code}: {self._last_words()}")

    def end(self) -> None:
        """Ask it to end, and wait until it has."""
        self._send(signal.SIGCONT)
        with contextlib.suppress(ProcessLookupError):
            self.launcher.send_signal(signal.SIGINT)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self.launcher.wait()

    def _send(self, number: int) -> None:
        """Send a signal to all its processes."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _processor_seconds(self) -> float:
        """Of its processes, and of those of theirs that have ended."""
        total = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])
        return total

    def _processes(self) -> list[psutil.Process]:
        return [psutil.Process(self.launcher.pid), *descendants(self.launcher.pid)] if self.is_going() else []

    def _new_iterations(self) -> list[float]:
        """Seconds of the iterations that have ended since the last call."""
        metrics = self.folder / METRICS
        if metrics.exists() and metrics.stat().st_size < self.position:  # an earlier run's has been renamed
            self.position = 0
        lines, self.position = complete_lines(metrics, self.position)
        trained = [line for line in lines if "seconds" in line]
        if trained:
            last: dict[str, Any] = trained[-1]
            loss = "" if last["loss"] is None else f"loss {last['loss']:.3f}"
            self.bars.update(self.bar, completed=last["iteration"], total=last["iterations"], loss=loss)
        return [line["seconds"] for line in trained]

    def _last_words(self) -> str:
        words = (self.folder / ERRORS).read_text(errors="replace").split("\n")
        return " ".join(word.strip() for word in words[-6:]).strip() or f"see {self.folder}"


def _busy_seconds() -> float:
    """Processor seconds of all programs of this machine, and what its host took away."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "steal", 0.0))


if __name__ == "__main__":
    run_tool(main)
