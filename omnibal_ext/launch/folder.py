"""The folder of a run: a run that resumes appends to its files, a new one first renames them ("metrics.1.jsonl")."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.identity import differences
from omnibal_ext.reading.checks import anything, mapping
from omnibal_ext.reading.document import read_json
from omnibal_ext.run_metrics import INPUTS, TIMELINE

LOCK = ".lock"
PLAN = "plan.json"
CHECKPOINTS, SAVE_INTERVAL = "checkpoints", 200
METRICS, LOG, TENSORBOARD = "metrics.jsonl", "train.log", "tensorboard"
WRITTEN = (METRICS, LOG, TENSORBOARD, TIMELINE)


def refuse_used(folder: Path) -> None:
    """Raise UserError if a run has written there, which --fresh forbids."""
    if found := [name for name in WRITTEN if (folder / name).exists()]:
        raise UserError(
            f"--fresh: {folder} has {found[0]} of an earlier run; choose a new --run-dir, or leave --fresh out to go on"
        )


OLD_PLACES = frozenset(("--data", "--output-dir", "--like", "--costs"))
"""Paths in notes of older versions; what lay there is noted by its hash."""


def is_made(note: Path, asked: Mapping[str, Any], *made: Path) -> bool:
    """Whether all of `made` exist, and `note` (of `write_record`) says that they were made from what is asked."""
    if not all(path.exists() for path in (note, *made)):
        return False
    return _noted(note) == _as_noted(asked)


def _as_noted(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as a note of them is read: tuples are lists."""
    return dict(json.loads(json.dumps(asked)))


def _noted(note: Path) -> dict[str, Any] | None:
    """Return what a note says, without `OLD_PLACES`; None if it is damaged."""
    try:
        noted = read_json(note, mapping(anything), "it is made again")
    except UserError:
        return None
    return {name: value for name, value in noted.items() if name not in OLD_PLACES}


def refuse_other(folder: Path, note: Path, asked: Mapping[str, Any]) -> None:
    """Raise UserError if a run was begun in `folder` on data made with other flags than `asked`; `note` is their file.

    Flags that an older version did not note are not compared.
    """
    if not (folder / INPUTS).exists() or not note.exists():
        return
    noted = _noted(note) or {}
    for how in differences(noted, {name: value for name, value in _as_noted(asked).items() if name in noted}):
        raise UserError(f"{folder}: a run was begun there on other data ({how}); choose another --run-dir")


def remove_unused(folder: Path, made: Path) -> None:
    """Remove a dataset or packs in a run's folder, so that others can be made; keep them if a run was started on them.

    Such a run may have to resume with them; then only the user may remove them.
    """
    if not (folder / INPUTS).exists() and (made / "manifest.json").exists():
        shutil.rmtree(made)


def number_old_files(folder: Path) -> list[Path]:
    """Rename the files of an earlier run: metrics.jsonl becomes metrics.1.jsonl, or .2 ...; return the new names.

    Several nodes may do this at the same time.
    """
    number = next(n for n in count(1) if not any(_numbered(folder / name, n).exists() for name in WRITTEN))
    moved = []
    for name in WRITTEN:
        with contextlib.suppress(FileNotFoundError):
            moved.append((folder / name).rename(_numbered(folder / name, number)))
    return moved


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
