"""Output of our programs: tables for people, one JSON object for scripts, progress bars on a terminal."""

import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
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


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to stdout: columns of numbers are right-aligned, but for the first.

    Cells are escaped: they may quote untrusted text. Lines are broken between words: a path or a number stays whole,
    and makes the table wider than the terminal if it has to.
    """
    console = Console(width=_columns(piped=PIPED))
    cells = [[_cell(value) for value in row] for row in rows]
    shown = list(zip(map(_cell, columns), *cells, strict=True))
    is_wide = sum(max(map(len, column)) + SPACE for column in shown) > console.width
    table, needed = Table(box=box.SIMPLE_HEAD), 0
    for position, (column, *values) in enumerate(shown):
        is_number = position > 0 and all(NUMBER.fullmatch(value.plain) for value in values)
        unbroken = [value.plain for value in values] if is_number else _words(values)
        least = max(map(len, (*_words([column]), *unbroken)), default=1)
        needed += least + SPACE
        fixed = least if is_number and is_wide else None
        table.add_column(
            column, justify="right" if is_number else "left", overflow="fold", min_width=least, width=fixed
        )
    for row in cells:
        table.add_row(*row)
    console.print(_cell(title), style="italic", soft_wrap=True)
    console.print(table, width=max(console.width, needed), soft_wrap=True)


PIPED = 140
"""Columns of a table that no terminal shows."""
SPACE = 3
"""Spaces around a cell of a table."""
NUMBER = re.compile(r"|-|none|[-+]?[\d.,]*\d(e[-+]?\d+)?(%|x)?( [A-Za-z/]+)?( ± .*)?|[ \u2581-\u2588]+")
"""What stands in a column of numbers: one with its unit and error, no value, or bars of a histogram."""


def _columns(piped: int) -> int:
    """Return how many columns to print: the terminal's (or COLUMNS), or `piped` where stdout is no terminal."""
    return Console().width if sys.stdout.isatty() or "COLUMNS" in os.environ else piped


def _words(cells: Iterable[Text]) -> list[str]:
    return [word for cell in cells for word in cell.plain.split()]


def _cell(value: object) -> Text:
    return Text(printable(str(value)))


def say_wrapped(*lines: str) -> None:
    """Print lines to stdout, escaped, and broken between words at the width of the terminal."""
    wrap = partial(textwrap.fill, width=_columns(piped=sys.maxsize), break_long_words=False, break_on_hyphens=False)
    say(*(line for text in lines for line in wrap(printable(text)).split("\n")))


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout, for `--json`."""
    json.dump(value, sys.stdout)
    sys.stdout.write("\n")


class RateColumn(ProgressColumn):
    """Column of a progress bar that shows items a second."""

    def render(self, task: Task) -> Text:
        """Return the rate of the task so far as text."""
        return Text(f"{task.speed or 0:,.0f}/s")


def track(items: Iterable[Item], description: str, total: int, every: float = 60.0) -> Iterator[Item]:
    """Yield `items`; on stderr a bar with the rate and the time left, or, where that is no terminal, a line every
    `every` seconds."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn()
    )  # fmt: skip
    console = Console(stderr=True)
    if not console.is_terminal:
        due = time.monotonic() + every
        for number, item in enumerate(items):
            if time.monotonic() > due:
                say(f"{description}: {number:,} of {total:,}", error=True)
                due = time.monotonic() + every
            yield item
        return
    with Progress(*columns, console=console) as progress:
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
