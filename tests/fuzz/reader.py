"""A reader of files that others wrote: whole files, and a program that reads them; and what readers share."""

import hashlib
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.reading.document import sealed

Files = Mapping[str, bytes]
ENDS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


@dataclass(frozen=True)
class Reader:
    """What is read: whole files by name, and a program that reads them in a folder."""

    files: Files
    read: Callable[[Path], Any]
    mend: Callable[[Path], None] = lambda folder: None
    """Makes hashes true again, so that what lies behind them is reached too."""
    may_end: bool = False
    """It is read in processes of their own (`omnibal_ext.launch.apart`), whose end is a refusal: one that is ended by
    `ENDS` is no finding."""


def each_of(pattern: str, read: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A program that reads every file that matches the pattern, and then raises the first refusal."""

    def read_all(folder: Path) -> None:
        refusals: list[Exception] = []
        for path in sorted(folder.glob(pattern)):
            try:
                read(path)
            except (UserError, Rejected) as refusal:
                refusals.append(refusal)
        if refusals:
            raise refusals[0]

    return read_all


def trained_on(load: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """`load` as training calls it: whatever it raises is said in a line, with the file's name."""

    def loaded(path: Path) -> Any:
        try:
            return load(path)
        except Exception as error:  # Pillow's and FFmpeg's readers raise nearly anything
            raise UserError(f"{path}: {str(error)[:200]!r}") from error

    return loaded


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def true_hashes(folder: Path) -> None:
    """Seal manifest.json again, after its files' checksums are made true."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        for name in manifest["checksums"]:
            manifest["checksums"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        path.write_text(json.dumps(sealed(manifest)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
