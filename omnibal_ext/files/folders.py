"""A folder that is made whole under another name, and then put in place of an older one."""

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from omnibal_ext.errors import UserError

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of Linux's renameat2."""


def refuse_within(flag: str, folder: Path, taken: Mapping[str, str | None]) -> None:
    """Raise UserError if a folder to be written to is, or lies in, one of those that only are read, by their flags."""
    for other, name in taken.items():
        if name and (inside := Path(name).resolve()) in (folder.resolve(), *folder.resolve().parents):
            raise UserError(
                f"{flag} {folder}: lies in {other} {name}, which a run reads; choose a folder outside of {inside}"
            )


def refuse_no_images(root: Path) -> None:
    """Raise UserError if the folder that image paths start from is not there."""
    if not root.is_dir():
        raise UserError(f"{root}: no such folder; --image-root is where image paths start from")


def refuse_without_manifest(folder: Path, what: str, maker: str) -> None:
    """Raise UserError if a folder is not there, or is not `what` `maker` makes: these have a manifest.json."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give {what} that {maker} has made")
    if not (folder / "manifest.json").exists():
        raise UserError(f"{folder}: is not {what}: has no manifest.json; make one with {maker}")


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """An empty folder beside `target` to write into; at the end it is `target`, after an error it is gone.

    Whoever looks sees the old folder or the new one, and a crash leaves one of them.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        folder.chmod(0o755)
        _put_in_place(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, target: Path) -> None:
    """Afterwards `folder` is what `target` was, if anything."""
    if not target.exists():
        folder.rename(target)
    elif not _exchange(folder, target):  # both names stay on disk, should this be the end
        aside = folder.with_name(f"{folder.name}.old")
        target.rename(aside)
        folder.rename(target)
        aside.rename(folder)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = (os.fsencode(one), os.fsencode(other))
    return rename is not None and rename(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0
