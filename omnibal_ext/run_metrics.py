"""What a run wrote: metrics.jsonl, a line an interval of training and one an evaluation; timeline.jsonl."""

import json
from pathlib import Path
from typing import Any

INPUTS = "inputs.json"
"""Beside metrics.jsonl: where the run's plan, profile and packs are."""
TIMELINE = "timeline.jsonl"
"""Beside metrics.jsonl: a line for each iteration that was recorded on every rank."""


def training_intervals(path: Path) -> list[dict[str, Any]]:
    """The intervals of training, in order; an interval that was run again after a resume counts as it last ran.

    A last line that is being written is left out; no file is no intervals.
    """
    return list({line["iteration"]: line for line in complete_lines(path)[0] if "evaluation" not in line}.values())


def evaluations(path: Path) -> dict[int, dict[str, Any]]:
    """What the evaluations found, by the iterations of training before them."""
    return {line["iteration"]: line["evaluation"] for line in complete_lines(path)[0] if "evaluation" in line}


def complete_lines(path: Path, position: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The lines that were written to the end behind a position, decoded, and where the next one starts."""
    if not path.exists():
        return [], position
    with path.open("rb") as file:
        file.seek(position)
        written, newline, _ = file.read().rpartition(b"\n")
    return [json.loads(line) for line in written.splitlines()], position + len(written) + len(newline)
