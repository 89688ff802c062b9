"""A file of JSON lines to which a run appends what it measures."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnibal_ext.output import say


class JsonLines:
    """What cannot be written is lost and said once: a log that nobody can keep ends no run.

    The file holds whole lines at any time, but for the moment of writing one: half a line, which a full disk or the end
    of the machine left, is taken out before the next.
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
    end = _whole(file)
    file.truncate(end)
    file.seek(end)
    try:
        while line:  # a disk takes what it has room for
            line = line[file.write(line) :]
    except OSError:
        file.truncate(end)
        raise


def _whole(file: Any) -> int:
    """Where the last whole line ends."""
    end: int = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 2**16)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0
