"""What a reader of files is to the fuzz tests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Reader:
    """What is read: whole files by name, and a program that reads them in a folder."""

    files: Files
    read: Callable[[Path], Any]
    mend: Callable[[Path], None] = lambda folder: None
    """Makes hashes true again, so that what lies behind them is reached too."""
