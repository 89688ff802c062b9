"""Checksums of a save, computed by all ranks: each hashes the files it wrote, or an equal part of those to be loaded.

Files are read twice: after saving from the page cache; before loading, which fills the cache for the load itself.
SHA-256 takes 1 to 2 GB a second on a core, and ranks work in parallel.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.vlm.checkpoint.folder import INTEGRITY, Save, facts_of, seal
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import THREADS

Value = TypeVar("Value")
_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")


def seal_by_all_ranks(path: Path, run: Mapping[str, Any]) -> None:
    """Write the integrity.json of a save whose files are all written; collective."""
    results = on_all_ranks(lambda: _facts(path, _written_here(path)))
    files = {name: facts for of_rank in results for name, facts in of_rank.items()}
    on_first_rank(lambda: seal(path, files, run))


def seal_by_one_process(path: Path, run: Mapping[str, Any]) -> None:
    """Write the integrity.json of a save that one process wrote."""
    seal(path, _facts(path, [file.name for file in path.iterdir() if file.is_file()]), run)


def damaged_files(save: Save) -> list[str]:
    """Return the names of a save's files whose checksum is wrong; collective, each rank reads an equal part."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected = save.integrity["files"]
    by_size = sorted(expected, key=lambda name: (save.integrity["sizes"][name], name))

    def look() -> list[str]:
        found = _facts(save.path, by_size[rank::ranks])
        return [name for name, (_, checksum) in found.items() if checksum != expected[name]]

    return sorted(name for names in on_all_ranks(look) for name in names)


def on_all_ranks(work: Callable[[], Value]) -> Sequence[Value]:
    """Return the results of `work` on all ranks; collective. A UserError or OSError of one rank is raised on all."""
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


def on_first_rank(work: Callable[[], Value]) -> Value:
    """Run `work` on the first rank and return its result on all; collective."""
    values: Sequence[Value | None] = on_all_ranks(lambda: work() if dist.get_rank() == 0 else None)
    return values[0]  # type: ignore[return-value]


def _facts(path: Path, names: Sequence[str]) -> dict[str, tuple[int, str]]:
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(names, pool.map(facts_of, (path / name for name in names)), strict=True))


def _written_here(path: Path) -> list[str]:
    return [file.name for file in path.iterdir() if file.is_file() and _writer(file.name) == dist.get_rank()]


def _writer(name: str) -> int | None:
    """Return the rank that wrote a file of a save; None for integrity.json itself."""
    if name == INTEGRITY or name.startswith(f".{INTEGRITY}"):
        return None
    data = _DATA_FILE.fullmatch(name)
    return int(data[1]) if data else 0
