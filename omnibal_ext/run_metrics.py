"""What a run wrote to metrics.jsonl: a line an interval of training, and one an evaluation."""

import json
from pathlib import Path
from typing import Any


def training_intervals(path: Path) -> list[dict[str, Any]]:
    """The intervals of training, in order; an interval that was run again after a resume counts as it last ran.

    A last line that is being written is left out; no file is no intervals.
    """
    return list({line["iteration"]: line for line in _lines(path) if "evaluation" not in line}.values())


def evaluations(path: Path) -> dict[int, dict[str, Any]]:
    """What the evaluations found, by the iterations of training before them."""
    return {line["iteration"]: line["evaluation"] for line in _lines(path) if "evaluation" in line}


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
