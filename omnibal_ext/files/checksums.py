"""SHA-256 of the files in a folder, which its manifest lists."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from omnibal_ext.errors import UserError
from omnibal_ext.reading.files import open_plain

THREADS = min(8, os.cpu_count() or 1)
"""hashlib releases the GIL."""


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text."""
    with open_plain(path, "see that it is there") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files of a folder by name, computed in several threads."""
    ordered = list(names)
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(ordered, pool.map(sha256_of, (folder / name for name in ordered)), strict=True))


def verify_checksums(folder: Path, expected: Mapping[str, str], remedy: str) -> None:
    """Hash the files and compare. Raises UserError naming the first that is damaged or missing."""
    found = checksums_of(folder, expected)
    for name, checksum in expected.items():
        if found[name] != checksum:
            raise UserError(f"{folder / name}: damaged: its checksum is not the manifest's; {remedy}")
