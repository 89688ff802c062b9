"""Tiles of images and of videos' frames, kept on a local disk: later epochs need not decode (`--cache-tiles DIR`).

DIR/tiles-USER-DECODER/KEY   CRC-32 of KEY and tiles (4 bytes), tiles as they are before they are normalised (uint8)

DECODER is a hash of what decodes and resizes, KEY of the rest that determines tiles: file, place in it and mark, grid
and side. Nothing depends on what is in DIR: where something is missing, damaged or cannot be written, images are
decoded, so anything in it may be deleted at any time. A folder in which others could write is not used. Tiles are not
compressed: that takes longer than to decode them.
"""

import errno
import os
import stat
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, features
from torch.utils.data import get_worker_info

from omnibal_ext import families
from omnibal_ext.errors import UserError
from omnibal_ext.files.writing import naming, remove_unfinished, replacing
from omnibal_ext.modalities.vision import tiling
from omnibal_ext.output import say
from omnibal_ext.reading.files import open_regular, size_of

Tiles = NDArray[np.uint8]
FULL = 0.9
"""Share of a file system's space above which nothing is written."""
KEY, CHECKSUM = 32, 4
"""Digits of a key, bytes of a checksum."""
CODECS = ("libjpeg_turbo", "jpg", "jpg_2000", "webp", "libtiff", "avif")
"""Pillow's, in its names, which are not always those that it brings."""


class TileCache:
    """A folder below DIR in which several processes of a user keep tiles."""

    def __init__(self, folder: Path) -> None:
        """Remove what killed processes have not finished."""
        self.folder, self.has_warned = folder.absolute() / f"tiles-{os.geteuid()}-{_hash(decoder())}", False
        if os.environ.get("LOCAL_RANK", "0") == "0" and self.is_own:  # one process per node looks at all names
            remove_unfinished(self.folder)

    @property
    def is_own(self) -> bool:
        """Whether the folder is there, and nobody else has put into it what is there."""
        try:
            found = self.folder.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022

    def of(self, source: object, shape: tuple[int, ...]) -> "KeptTiles":
        """Return the tiles of a source, whose `repr` says all that they depend on beside `decoder`."""
        return KeptTiles(self, self.folder / _hash(repr((source, shape))), shape)

    def write(self, path: Path, content: Iterable[bytes | memoryview], size: int) -> None:
        """Write a file, if there is room for `size` bytes; a warning says once, by one process of a rank, that not."""
        try:
            with naming(self.folder):
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                self.folder.mkdir(mode=0o700, exist_ok=True)
                if not self.is_own:
                    raise OSError(errno.EPERM, "others may write in it", str(self.folder))
                disk = os.statvfs(self.folder)
                if disk.f_bavail * disk.f_frsize - size < (1 - FULL) * disk.f_blocks * disk.f_frsize:
                    raise OSError(errno.ENOSPC, f"{FULL:.0%} of its disk are used")
                with replacing(path, is_lasting=False) as file:
                    file.writelines(content)
        except UserError as error:
            worker = get_worker_info()
            if not self.has_warned and (worker is None or worker.id == 0):
                say(f"warning: {str(error).rpartition('; ')[0]}: images are decoded, and their tiles not kept there")
            self.has_warned = True


@dataclass(frozen=True, slots=True)
class KeptTiles:
    """Tiles of a source in a cache, uint8 [shape], if they are there."""

    cache: TileCache
    path: Path
    shape: tuple[int, ...]

    @property
    def are_there(self) -> bool:
        """Whether there is a file of them, which may be damaged."""
        return self.cache.is_own and os.access(self.path, os.R_OK)

    def tiles(self, compare: Callable[[], object], make: Callable[[], Tiles]) -> Tiles:
        """Return them after `compare`, or what `make` returns, which is kept. Both raise if the source has changed."""
        if (kept := self._read()) is not None:
            compare()
            return kept
        tiles = np.ascontiguousarray(make())
        self.cache.write(self.path, (self._checksum(tiles), tiles.data), CHECKSUM + tiles.nbytes)
        return tiles

    def _read(self) -> Tiles | None:
        """Return what is there, or None if it is not whole."""
        if not self.cache.is_own:
            return None
        try:
            with open_regular(self.path) as file:
                tiles = np.empty(self.shape, np.uint8)
                if size_of(file) != CHECKSUM + tiles.nbytes:
                    return None
                checksum, count = file.read(CHECKSUM), file.readinto(tiles.data)
        except OSError:
            return None
        return tiles if count == tiles.nbytes and checksum == self._checksum(tiles) else None

    def _checksum(self, tiles: Tiles) -> bytes:
        return zlib.crc32(tiles.data, zlib.crc32(self.path.name.encode())).to_bytes(CHECKSUM, "big")


def decoder() -> str:
    """Return what decodes and resizes here: packages, codecs, vector instructions, by which torch resizes frames, and a
    hash of our code."""
    versions = [Image.__version__, *map(features.version, CODECS), torch.__version__]
    with suppress(ImportError):  # images need none
        import av

        versions += [av.__version__, av.library_versions]
    return repr((versions, torch.backends.cpu.get_cpu_capability(), _code()))


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:KEY]


def _code() -> str:
    media, rules = Path(__file__).parent, Path(families.__file__).parent
    files = [Path(tiling.__file__), *media.glob("*.py"), *media.parent.glob("inputs/*.py"), *rules.glob("*/tiling.py")]
    return sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()
