"""Writes folders under a temporary name and moves them into place; refuses wrong folders."""

import ctypes
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from omnibal_ext.errors import UserError
from omnibal_ext.files.writing import hidden_name, naming, new_folder, remove_unfinished

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of Linux's renameat2."""
TAKE_ANOTHER = "choose another folder: --output-dir, or --run-dir of omnibal launch"
"""Remedy where a folder holds something else: a run goes on only with the data that it began with."""


def refuse_within(flag: str, folder: Path, taken: Mapping[str, str | None]) -> None:
    """Raise UserError if the output folder of `flag` is, or is in, an input folder; `taken`: {flag: input folder}."""
    for other, name in taken.items():
        if name and (inside := Path(name).resolve()) in (folder.resolve(), *folder.resolve().parents):
            raise UserError(
                f"{flag} {folder}: lies in {other} {name}, which a run reads; choose a folder outside of {inside}"
            )


def check_exists(path: Path) -> None:
    """Raise UserError if a path that a user gave for conversations or sizes does not exist."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; name those of your conversations, or of their sizes")


def refuse_no_images(root: Path) -> None:
    """Raise UserError if the folder of --image-root does not exist."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; --image-root is where image paths start from")


def refuse_without_manifest(folder: Path, what: str, maker: str) -> None:
    """Raise UserError if a folder is missing or has no manifest.json; `what`: what it should be, made by `maker`."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give {what} that {maker} has made")
    if not (folder / "manifest.json").exists():
        raise UserError(f"{folder}: is not {what}: has no manifest.json; make one with {maker}")


def noted_path(base: Path, path: str | Path) -> str:
    """Return a path as files in `base` hold it: relative to `base` if inside, so that both can move; else absolute."""
    base, path = (Path(os.path.realpath(one)) for one in (base, path))
    return str(path.relative_to(base)) if path.is_relative_to(base) else str(path)


def path_noted(base: Path, noted: str) -> Path:
    """Return the path that `noted_path` gave as `noted`; in older files it may start from the working directory."""
    inside, given = base / noted, Path(noted)
    return given if given.exists() and not inside.exists() else inside


@contextmanager
def building(target: Path, keeps: bool = False) -> Iterator[Path]:
    """Yield a new folder to write into; at the end it takes the place of `target`, after an error it is removed.

    `keeps`: a `target` that another program has made meanwhile stays. At any time, also after a crash, the old folder
    or the new one is there, complete; what a killed program has left is removed. Raises UserError where the system
    refuses.
    """
    target = Path(os.path.realpath(target))  # a link stays one
    with naming(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_unfinished(target.parent, target.name)
        with new_folder(hidden_name(target)) as folder:
            try:
                yield folder
                if not (keeps and target.exists()):
                    _put_in_place(folder, target)
            finally:
                shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`, atomically where the system can; an old `target` gets the name of `folder`."""
    if not target.exists():
        folder.rename(target)
    elif not _exchange(folder, target):  # three renames; a crash between them loses neither folder
        old = folder.with_name(f"{folder.name}.old")
        target.rename(old)
        folder.rename(target)
        old.rename(folder)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically; False if the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (os.fsencode(one), os.fsencode(other))
    return rename is not None and rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0
