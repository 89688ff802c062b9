"""Checksums of a save, by all ranks: each reads what it wrote itself, or its share of what all are about to load.

What it costs is one reading of the files: when saving they are in the system's cache still, and when loading they are
there afterwards for the loading itself. SHA-256 reads 1 to 2 GB a second on a core of today, and ranks work at once.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.vlm.checkpoint.folder import INTEGRITY, Save, facts_of, seal
from omnibal_ext.errors import UserError
from omnibal_ext.files.checksums import THREADS

Value = TypeVar("Value")
_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")


def seal_together(path: Path, run: Mapping[str, Any]) -> None:
    """Write the integrity.json of a save whose files are all written; every rank calls it."""
    names = [file.name for file in path.iterdir() if file.is_file() and _writer(file.name) == dist.get_rank()]
    shares = gathered(lambda: _facts(path, names))
    files = {name: facts for share in shares for name, facts in share.items()}
    once(lambda: seal(path, files, run))


def seal_alone(path: Path, run: Mapping[str, Any]) -> None:
    """The same by one process."""
    seal(path, _facts(path, [file.name for file in path.iterdir() if file.is_file()]), run)


def damaged_files(save: Save) -> list[str]:
    """The files of a save whose bytes are not those that were written; every rank calls it and reads its share."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected = save.integrity["files"]
    by_size = sorted(expected, key=lambda name: (save.integrity["sizes"][name], name))

    def look() -> list[str]:
        found = _facts(save.path, by_size[rank::ranks])
        return [name for name, (_, checksum) in found.items() if checksum != expected[name]]

    return sorted(name for share in gathered(look) for name in share)


def gathered(work: Callable[[], Value]) -> Sequence[Value]:
    """What `work` gives on every rank. A UserError or OSError of one rank is raised on all."""
    mine: tuple[Value | None, str] = (None, "")
    try:
        mine = (work(), "")
    except (UserError, OSError) as error:
        mine = (None, str(error))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for _, reason in everyone:
        if reason:
            raise UserError(reason)
    return [value for value, _ in everyone]


def once(work: Callable[[], Value]) -> Value:
    """What `work` gives on the first rank, on all of them."""
    values: Sequence[Value | None] = gathered(lambda: work() if dist.get_rank() == 0 else None)
    return values[0]  # type: ignore[return-value]


def _facts(path: Path, names: Sequence[str]) -> dict[str, tuple[int, str]]:
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(facts_of, (path / name for name in names)), strict=True))


def _writer(name: str) -> int | None:
    """The rank that wrote a file of a save."""
    if name == INTEGRITY or name.startswith(f".{INTEGRITY}"):
        return None
    data = _DATA_FILE.fullmatch(name)
    return int(data[1]) if data else 0
