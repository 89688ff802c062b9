"""A folder of checkpoints: its saves, which of them are complete, and from which a run resumes.

FOLDER/latest_checkpointed_iteration.txt   the tracker: the iteration of the newest save, or "release"
FOLDER/iter_0000120/                       a save of the trainer
FOLDER/release/                            converted weights
.../integrity.json                         written last: size and SHA-256 of the save's files, and facts of its run

A save without integrity.json is incomplete. One with a file that is not listed there is refused, since core might read
that file. Megatron alone writes the tracker in place: killed while doing so it leaves an empty one; then the newest
save in the folder counts.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.files.records import sha256_of, write_text
from omnibal_ext.reading.checks import anything, finite, integer, listing, mapping, maybe, record, text
from omnibal_ext.reading.document import read_json, sealed, sealed_by
from omnibal_ext.reading.files import read_bytes

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
INTEGRITY = "integrity.json"
"""Megatron's --verify-integrity writes a file of this name too; ours has more fields, and all ranks compute hashes."""
SUPERSEDED = ".aside"
"""Suffix for a save that is newer than the one from which its run resumed."""
MOST_TRACKED = 2**10
SMALL = 2**26
"""Bytes up to which a file is hashed by every `Save.check`; data files are hashed only before they are loaded."""
OLDER = "take an older save, or make it anew"
_RUN = record({}, {
    "preset": maybe(text), "model": text, "from": maybe(text),
    "global_batch_size": integer(), "consumed_packs": integer(), "expert_ranks": integer(),
    "flags": mapping(anything), "buckets": maybe(mapping(anything)),
    "optimizer": maybe(record({}, {"frozen": listing(text)})),
    "adapters": maybe(record({"rank": integer(), "alpha": finite(), "targets": listing(text)})),
})  # fmt: skip
"""What `checkpoint.run.describe_run` returns; converted weights have none of it."""
_FACTS = sealed_by(record({"files": mapping(text), "sizes": mapping(integer()), "run": _RUN}, {"save": text}))


@dataclass(frozen=True)
class Save:
    """One save. `iteration` is 0 for converted weights."""

    path: Path
    iteration: int

    @cached_property
    def integrity(self) -> dict[str, Any]:
        """integrity.json: `save` (folder name), `files` {name: SHA-256}, `sizes` {name: bytes}, `run`.

        Raises UserError if it is missing or damaged.
        """
        path = self.path / INTEGRITY
        if not os.path.lexists(path):
            raise UserError(f"{path}: is missing: the save was not written to its end, or not by this trainer")
        found = read_json(path, _FACTS, OLDER)
        if found["files"].keys() != found["sizes"].keys() or any("/" in name for name in found["files"]):
            raise UserError(f"{path}: does not list the files of one folder with their sizes; {OLDER}")
        return dict(found)

    def check(self, trust: bool = False) -> None:
        """Raise UserError unless exactly the listed files exist, with their sizes; of small files also the checksums.

        With `trust` a save without integrity.json passes.
        """
        if trust and not (self.path / INTEGRITY).exists() and (self.path / ".metadata").is_file():
            return
        name = self.path.name.removesuffix(SUPERSEDED)
        if (said := self.integrity.get("save", name)) != name:  # Megatron would take the iteration from the name
            raise UserError(f"{self.path}: is a copy of {said!r} under another name; take it away")
        listed = self.integrity["sizes"]
        if strange := sorted({path.name for path in self.path.iterdir()} - {*listed, INTEGRITY}):
            raise UserError(f"{self.path}: {strange[0]!r} is none of the files that {INTEGRITY} lists; remove it")
        for name, size in listed.items():
            file = self.path / name
            if not file.is_file():
                raise UserError(f"{file}: is missing")
            if file.stat().st_size != size:
                raise UserError(f"{file}: has {file.stat().st_size} bytes of {size}")
            if size < SMALL and not name.endswith(".distcp") and sha256_of(file) != self.integrity["files"][name]:
                raise UserError(f"{file}: damaged: its checksum is another one")


def seal(save: Path, files: Mapping[str, tuple[int, str]], run: Mapping[str, Any]) -> None:
    """Write a save's integrity.json, which makes it complete; files: {name: (bytes, SHA-256)}."""
    facts = {
        "algorithm": "sha256",
        "save": save.name,
        "files": {name: checksum for name, (_, checksum) in sorted(files.items())},
        "sizes": {name: size for name, (size, _) in sorted(files.items())},
        "run": run,
    }
    write_text(save / INTEGRITY, json.dumps(sealed(facts), indent=1) + "\n")


def facts_of(file: Path) -> tuple[int, str]:
    """Return (size in bytes, SHA-256) of a file."""
    return file.stat().st_size, sha256_of(file)


@dataclass(frozen=True)
class Checkpoints:
    """A folder of saves."""

    folder: Path

    @property
    def tracked(self) -> str | None:
        """Content of the tracker, the file that names the newest save; None if there is none."""
        try:
            return read_bytes(self.folder / TRACKER, "", MOST_TRACKED).decode(errors="replace").strip()
        except UserError:
            return None

    @property
    def exist(self) -> bool:
        """Whether there is a tracker or a complete save."""
        return self.tracked is not None or any((save.path / INTEGRITY).is_file() for save in self.saves())

    @property
    def are_release(self) -> bool:
        """Whether these are converted weights, not the saves of a run (whose tracker may be damaged)."""
        return self.tracked == RELEASE and ((self.folder / RELEASE).is_dir() or not self.saves())

    def saves(self) -> list[Save]:
        """Return all saves of the trainer, newest first, complete or not."""
        found = [(path, path.name.removeprefix("iter_")) for path in self.folder.glob("iter_*") if path.is_dir()]
        saves = [save_of(self.folder, int(number)) for _, number in found if number.isdecimal() and len(number) < 10]
        return sorted({save for save in saves if save.path.is_dir()}, key=lambda save: -save.iteration)

    def candidates(self, step: int | None = None) -> list[Save]:
        """Return the saves to resume from, in order of preference: the tracked one, then older ones.

        All saves, if the tracker is missing or older than all of them. `step` (--ckpt-step) allows that save only.
        """
        if step:
            return [save_of(self.folder, step)]
        if self.are_release:
            return [Save(self.folder / RELEASE, 0)]
        saves, tracked = self.saves(), self.tracked or ""
        newest = int(tracked) if tracked.isdecimal() and len(tracked) < 10 else None
        if newest is None or all(save.iteration > newest for save in saves):
            return saves
        if all(save.iteration != newest for save in saves):  # the tracked save was removed
            return [save for save in saves if save.iteration < newest]
        return [save for save in saves if save.iteration <= newest]

    def newest(self, step: int | None = None, trust: bool = False) -> Save:
        """Return the first candidate that `Save.check` accepts. Raises UserError if there is none."""
        faults = []
        for save in self.candidates(step):
            try:
                save.check(trust)
            except UserError as error:
                faults.append(str(error))
            else:
                return save
        raise UserError(no_complete_save(self.folder, faults))

    def first_weights(self, step: int | None = None, trust: bool = False) -> Save:
        """Return the first candidate, for --from. Raises UserError if it is damaged: an older save is no substitute."""
        complete, first = self.newest(step, trust), self.candidates(step)[0]
        try:
            first.check(trust)
        except UserError as error:
            raise UserError(incomplete_first_weights(self.folder, str(error), complete)) from None
        return first

    def track(self, save: Save) -> None:
        """Write this save into the tracker."""
        write_text(self.folder / TRACKER, RELEASE if save.path.name == RELEASE else str(save.iteration))


def no_complete_save(folder: Path, faults: list[str]) -> str:
    """Return the error message for a folder without a complete save."""
    if not faults:
        return f"{folder}: no checkpoint here; give the folder that --save named"
    return (
        f"{folder}: no save in it is whole: {faults[0]}; start anew in another folder, or take what cannot be verified "
        "with --trust"
    )


def incomplete_first_weights(folder: Path, fault: str, complete: Save) -> str:
    """Return the error message for --from if only an older save, `complete`, is complete."""
    return f"--from {folder}: {fault}; {complete.path.name} is whole: name it in {TRACKER}"


def save_of(folder: Path, iteration: int) -> Save:
    """Return the save of an iteration, by Megatron's name for it; copies with other names do not count."""
    return Save(folder / f"iter_{iteration:07d}", iteration)


def iteration_of(save: Path) -> int:
    """Return the iteration in the name of a save's folder."""
    return int(save.name.removeprefix("iter_"))
