"""A folder of checkpoints: which saves lie there, which of them are whole, and from which one a run goes on.

FOLDER/latest_checkpointed_iteration.txt   the tracker: the iteration of the newest save, or "release"
FOLDER/iter_0000120/                       a save of the trainer
FOLDER/release/                            converted weights
.../integrity.json                         written last: size and SHA-256 of the save's files, and what run it is of

A save without its integrity.json was not written to its end. Megatron writes the tracker in place: a run that was
killed there leaves an empty one, and what lies in the folder decides.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omnibal_ext.checksums import sha256_of
from omnibal_ext.errors import UserError
from omnibal_ext.records import write_text

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
INTEGRITY = "integrity.json"
"""Megatron's --verify-integrity writes a file of this name; ours has its fields and more, by all ranks."""
SMALL = 2**26
"""Bytes of a file that is read whole wherever a save is looked at; data files are read before they are loaded."""
SEAL = "manifest_hash"


@dataclass(frozen=True)
class Save:
    """One save. `iteration` is 0 for converted weights."""

    path: Path
    iteration: int

    @cached_property
    def integrity(self) -> dict[str, Any]:
        """What integrity.json says: `files` {name: SHA-256}, `sizes` {name: bytes}, `run`.

        Raises UserError if it is missing or damaged.
        """
        path = self.path / INTEGRITY
        try:
            found = json.loads(path.read_bytes())
            if found.pop(SEAL) == _hash(found):
                return dict(found)
        except FileNotFoundError:
            raise UserError(
                f"{path}: is missing: the save was not written to its end, or not by this trainer"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        raise UserError(f"{path}: damaged")

    def check(self, trust: bool = False) -> None:
        """Raise UserError, saying what is wrong, unless all files are there, of their sizes; small ones are read.

        With `trust` a save without integrity.json passes: nobody can say whether it is whole.
        """
        if trust and not (self.path / INTEGRITY).exists() and (self.path / ".metadata").is_file():
            return
        for name, size in self.integrity["sizes"].items():
            file = self.path / name
            if not file.is_file():
                raise UserError(f"{file}: is missing")
            if file.stat().st_size != size:
                raise UserError(f"{file}: has {file.stat().st_size} bytes of {size}")
            if size < SMALL and not name.endswith(".distcp") and sha256_of(file) != self.integrity["files"][name]:
                raise UserError(f"{file}: damaged: its checksum is another one")


def seal(save: Path, files: Mapping[str, tuple[int, str]], run: Mapping[str, Any]) -> None:
    """Write a save's integrity.json: size and SHA-256 of its files. The save is whole then."""
    record = {
        "algorithm": "sha256",
        "files": {name: checksum for name, (_, checksum) in sorted(files.items())},
        "sizes": {name: size for name, (size, _) in sorted(files.items())},
        "run": json.loads(json.dumps(run)),
    }
    write_text(save / INTEGRITY, json.dumps({**record, SEAL: _hash(record)}, indent=1) + "\n")


def facts_of(file: Path) -> tuple[int, str]:
    """Size and SHA-256."""
    return file.stat().st_size, sha256_of(file)


@dataclass(frozen=True)
class Checkpoints:
    """A folder of saves."""

    folder: Path

    @property
    def tracked(self) -> str | None:
        """What the tracker says; None if there is none."""
        try:
            return (self.folder / TRACKER).read_bytes().decode(errors="replace").strip()
        except OSError:
            return None

    @property
    def exist(self) -> bool:
        """Whether something has been saved there to the end."""
        return self.tracked is not None or any((save.path / INTEGRITY).is_file() for save in self.saves())

    @property
    def are_release(self) -> bool:
        """Whether these are converted weights, no run's own, whose tracker may be damaged."""
        return self.tracked == RELEASE and ((self.folder / RELEASE).is_dir() or not self.saves())

    def saves(self) -> list[Save]:
        """All saves of the trainer, newest first, whole or not."""
        found = [(path, path.name.removeprefix("iter_")) for path in self.folder.glob("iter_*") if path.is_dir()]
        saves = [Save(path, int(number)) for path, number in found if number.isdecimal()]
        return sorted(saves, key=lambda save: -save.iteration)

    def candidates(self, step: int | None = None) -> list[Save]:
        """The saves that a run could go on from, best first: the one tracked, then older ones.

        Where the tracker names none that is there, all of them. `step` (--ckpt-step) names the only one.
        """
        if step:
            return [Save(self.folder / f"iter_{step:07d}", step)]
        if self.are_release:
            return [Save(self.folder / RELEASE, 0)]
        saves, tracked = self.saves(), self.tracked or ""
        newest = int(tracked) if tracked.isdecimal() and len(tracked) < 10 else None
        if newest is None or all(save.iteration > newest for save in saves):
            return saves
        if all(save.iteration != newest for save in saves):  # it is gone: the one before it
            return [save for save in saves if save.iteration < newest]
        return [save for save in saves if save.iteration <= newest]

    def newest(self, step: int | None = None, trust: bool = False) -> Save:
        """The best candidate that is whole as far as `Save.check` sees. Raises UserError if none is."""
        faults = []
        for save in self.candidates(step):
            try:
                save.check(trust)
            except UserError as error:
                faults.append(str(error))
            else:
                return save
        raise UserError(none_whole(self.folder, faults))

    def track(self, save: Save) -> None:
        """Let the tracker name this save."""
        write_text(self.folder / TRACKER, RELEASE if save.path.name == RELEASE else str(save.iteration))


def none_whole(folder: Path, faults: list[str]) -> str:
    """What to say of a folder in which no save can be used."""
    if not faults:
        return f"{folder}: no checkpoint here; give the folder that --save named"
    return (
        f"{folder}: no save in it is whole: {faults[0]}; start anew in another folder, or take what cannot be verified "
        "with --trust"
    )


def _hash(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
