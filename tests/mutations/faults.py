"""Faults on file, in faults.jsonl, one a line: {"name", "file", "old", "new", "test", "fault"}.

`old` stands once in `file`, `new` takes its place; of the tests in the list `test` one must fail; `fault` says what is
wrong.
"""

import json
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("faults.jsonl")


@dataclass(frozen=True)
class Fault:
    """A text of a file that gives way to another."""

    name: str
    file: str
    """Relative to the repository."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Pytest arguments, the likeliest to see it first."""
    at: int | None = None
    """Where the old text begins; None: where it stands, which is one place."""

    def plant(self, text: str) -> str:
        """The file's text with the fault in it; ValueError unless the old text stands there once."""
        if self.at is None and text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its old text stands {text.count(self.old)} times in {self.file}")
        at = text.index(self.old) if self.at is None else self.at
        return text[:at] + self.new + text[at + len(self.old) :]


def read_faults() -> list[Fault]:
    """Every fault on file, in its order."""
    records = map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
    return [Fault(one["name"], one["file"], one["old"], one["new"], tuple(one["test"])) for one in records]
