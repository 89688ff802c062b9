"""What our programs print: tables for people, one JSON object for scripts, progress on a terminal."""

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

from omnibal_ext.run_metrics import training_intervals

Item = TypeVar("Item")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to stdout; numbers are right-aligned, the first column is left-aligned."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def print_json(value: dict[str, Any]) -> None:
    """Print exactly one JSON object on stdout (what every tool does under `--json`)."""
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


def follow_metrics(path: Path, is_running: Callable[[], bool]) -> None:
    """Show a running job's iterations on stderr, read from the metrics.jsonl it appends to, until it ends.

    On a terminal a bar; elsewhere a line every tenth of the way.
    """
    columns = (TextColumn("iteration"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        bar, tenths = progress.add_task("starting", total=None), 0
        running = True
        while running:
            running = is_running()
            time.sleep(0.5)
            lines = training_intervals(path)
            if not lines:
                continue
            last = lines[-1]
            text = f"loss {last['loss']:.3f}, {last['samples_per_second']:.0f} samples/s"
            progress.update(bar, completed=last["iteration"], total=last["iterations"], description=text)
            if not console.is_terminal and last["iteration"] * 10 // last["iterations"] > tenths:
                tenths = last["iteration"] * 10 // last["iterations"]
                print(f"  iteration {last['iteration']}/{last['iterations']}: {text}", file=sys.stderr, flush=True)
