"""A JSON Lines file to which a run appends its measurements."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnibal_ext.output import say


class JsonLines:
    """Appends to a file. A line that cannot be written is lost, with a warning, and the run goes on.

    An incomplete line at the end, left by a full disk or a crash, is removed before the next one is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failing = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one more line."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            with self.path.open("r+b", buffering=0) as file:
                _append(file, json.dumps(record).encode() + b"\n")
        except OSError as error:
            if not self.failing:
                say(f"warning: {self.path}: cannot be written ({error.strerror}); training goes on without it")
            self.failing = True
        else:
            self.failing = False


def _append(file: Any, line: bytes) -> None:
    end = _end_of_lines(file)
    file.truncate(end)
    file.seek(end)
    try:
        while line:  # a write can be partial
            line = line[file.write(line) :]
    except OSError:
        file.truncate(end)
        raise


def _end_of_lines(file: Any) -> int:
    """Return the offset at which the last complete line ends."""
    end: int = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 2**16)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0
