"""Output of our programs: tables for people, one JSON object for scripts, progress bars on a terminal."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from omnibal_ext.output import printable, say
from omnibal_ext.run_metrics import complete_lines, loss_text

Item = TypeVar("Item")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: bool = True) -> None:
    """Print a table to stdout: the first column is left-aligned, the others, if `right`, right-aligned as numbers are.

    Cells are escaped: they may quote untrusted text.
    """
    table = Table(title=_cell(title), title_justify="left", box=box.SIMPLE_HEAD)
    for position, column in enumerate(columns):
        table.add_column(_cell(column), justify="right" if right and position else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _cell(value: object) -> Text:
    return Text(printable(str(value)))


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout, for `--json`."""
    json.dump(value, sys.stdout)
    sys.stdout.write("\n")


class RateColumn(ProgressColumn):
    """Items a second."""

    def render(self, task: Task) -> Text:
        """The rate so far."""
        return Text(f"{task.speed or 0:,.0f}/s")


def track(items: Iterable[Item], description: str, total: int) -> Iterator[Item]:
    """Yield `items`, with a progress bar, the rate and the time left on stderr when that is a terminal."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn()
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield from progress.track(items, total=total, description=description)


def follow_metrics(path: Path, is_running: Callable[[], bool], start: int = 0, every: float = 60.0) -> None:
    """Show a running job's iterations on stderr, read from its metrics.jsonl, until it ends.

    `start`: byte at which this run's lines begin. On a terminal a bar; elsewhere a line every `every` seconds, and one
    for the last iteration.
    """
    columns = (TextColumn("iteration"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("starting", total=None)
        shown, due, position, last = 0, time.monotonic() + every, start, None
        running = True
        while running:
            running = is_running()
            time.sleep(0.5 if running else 0)
            lines, position = complete_lines(path, position)
            last = next((line for line in reversed(lines) if "loss" in line), last)
            if last is None or last["iteration"] == shown:
                continue
            text = f"loss {loss_text(last['loss'], 3)}, {last['samples_per_second']:.0f} samples/s"
            progress.update(bar, completed=last["iteration"], total=last["iterations"], description=text)
            if not console.is_terminal and (time.monotonic() >= due or not running):
                shown, due = last["iteration"], time.monotonic() + every
                say(f"  iteration {shown}/{last['iterations']}: {text}", error=True)
