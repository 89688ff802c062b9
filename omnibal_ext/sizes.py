"""Sizes of samples: ViT tiles, LLM tokens, and any further named sizes."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.files.records import checksums_of, sha256_of
from omnibal_ext.files.writing import replacing
from omnibal_ext.large_arrays import PIECE, in_pieces, is_mapped, release, rows_of, scratch
from omnibal_ext.modalities.modality import FURTHER_SIZES, LANGUAGE, MODALITIES, VISION
from omnibal_ext.reading.arrays import array_names, map_array, read_arrays
from omnibal_ext.reading.checks import anything, listing, mapping, record, shown, text
from omnibal_ext.reading.document import read_json
from omnibal_ext.reading.files import open_plain

JSON_NAMES = {LANGUAGE.size: "token_num"} | {
    one.size: one.budget.replace("budget", "num") for one in MODALITIES if one is not LANGUAGE
}
"""Fields of sizes in a JSON list, where they are not as in an .npz."""
REMEDY = "give a sizes file, a JSON list or an .npz, or a folder of .npy files"
MOST_ROWS, MOST_JSON = 2**30, 2**31
"""Limits of a JSON list; an .npz may be larger."""
MAPPED = 1 << 23
"""Samples of a folder of .npy files above which its arrays can stay on disk."""
CORPUS_SETS = mapping(record({}, {"token_lengths": text}))
"""Schema of a file that names the sizes files of its sets, as the script of OmniBal's authors reads."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of every sample of a corpus; sample i is row i of all arrays.

    `tokens` includes image tokens. A text-only sample has 0 tiles. At native resolution, tiles are patches. `more` are
    further sizes by name, such as audio frames or sums of squared image lengths. Arrays that stay on disk are of any
    type of integers.
    """

    tiles: NDArray[np.int32]  # [N]
    tokens: NDArray[np.int64]  # [N]
    more: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)  # of [N] each

    def __len__(self) -> int:
        return len(self.tokens)

    def of(self, size: str) -> NDArray[Any]:
        """Return one size ("tiles", "tokens", a key of `more`) of all samples, [N]; zeros if they have none of it."""
        columns: dict[str, NDArray[Any]] = {VISION.size: self.tiles, LANGUAGE.size: self.tokens, **self.more}
        return columns[size] if size in columns else np.zeros(len(self), np.int64)

    def take(self, samples: NDArray[np.int64]) -> "Sizes":
        """Return the sizes of `samples` in memory, in that order; a sample may be repeated."""
        more = {name: rows_of(values, samples).astype(np.int64, copy=False) for name, values in self.more.items()}
        tiles, tokens = rows_of(self.tiles, samples), rows_of(self.tokens, samples)
        return Sizes(tiles.astype(np.int32, copy=False), tokens.astype(np.int64, copy=False), more)

    def total(self, size: str) -> int:
        """Return the sum over all samples of a size."""
        return sum(int(values.sum(dtype=np.int64)) for (values,) in in_pieces(self.of(size)))

    def most(self, size: str) -> int:
        """Return the largest value of a size among samples; 0 without samples."""
        return max((int(values.max()) for (values,) in in_pieces(self.of(size))), default=0)

    def without_unused(self) -> "Sizes":
        """Return the sizes without columns of further modalities, such as mel frames, that are 0 in all samples."""
        kept = {name: one for name, one in self.more.items() if name not in FURTHER_SIZES or one.any()}
        return Sizes(self.tiles, self.tokens, kept)

    @classmethod
    def from_arrays(cls, tiles: Any, tokens: Any, origin: str = "sizes", **more: Any) -> "Sizes":
        """Check integer arrays of one length and return them as sizes; `more` are further sizes by name.

        Raises:
            UserError: naming `origin` and the first row at fault.
        """
        columns = {"tiles": tiles, "tokens": tokens, **more}
        tiles, tokens, *further = _checked({name: np.asarray(values) for name, values in columns.items()}, origin)
        more = {name: values.astype(np.int64) for name, values in zip(more, further, strict=True)}
        return cls(tiles.astype(np.int32), tokens.astype(np.int64), more)

    @classmethod
    def load(cls, paths: Sequence[str | Path] | str | Path, more: Sequence[str] = (), on_disk: bool = False) -> "Sizes":
        """Read files of sizes as one corpus, numbered from 0 in the order of `paths`.

        A JSON file is a list of `{"vit_num": tiles, "token_num": tokens, ...}`, an `.npz` holds `tiles` and `tokens`, a
        folder `tiles.npy` and `tokens.npy`, of any type of integers; `more` names further fields or arrays. Those of
        modalities, such as mel frames (`FURTHER_SIZES`), are 0 where a file has none.

        Args:
            on_disk: leave folders of more than `MAPPED` (8 million) samples on disk.

        Raises:
            UserError: naming the file, and the row where a row is at fault.
        """
        if isinstance(paths, str | Path):
            paths = [paths]
        return cls.concatenate([_load_one(Path(path), more, on_disk) for path in paths])

    @classmethod
    def concatenate(cls, corpora: Sequence["Sizes"]) -> "Sizes":
        """Concatenate the sizes of several corpora; further sizes are those of the first, which all must have."""
        if len(corpora) == 1:
            return corpora[0]
        more = corpora[0].more if corpora else ()
        return cls(
            _joined([each.tiles for each in corpora], np.int32),
            _joined([each.tokens for each in corpora], np.int64),
            {name: _joined([each.more[name] for each in corpora], np.int64) for name in more},
        )

    def save(self, path: str | Path, **columns: NDArray[Any]) -> None:
        """Write an `.npz` that `load` reads; `columns`: further values of the samples, [N] each, by name."""
        with replacing(Path(path)) as file:
            np.savez(file, allow_pickle=False, tiles=self.tiles, tokens=self.tokens, **self.more, **columns)


def sizes_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the sizes files that `paths` name: themselves, or those in a JSON object `{SET: {"token_lengths": FILE}}`.

    FILE starts from the folder of that object's file. Sets without `token_lengths` are passed over.

    Raises:
        UserError: naming the file that cannot be read, or names no sizes file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.suffix != ".json" or path.is_dir() or not _is_object(path):
            files.append(path)
            continue
        sets = read_json(path, CORPUS_SETS, REMEDY)
        named = [path.parent / one["token_lengths"] for one in sets.values() if "token_lengths" in one]
        if not named:
            raise UserError(f"{path}: no set in it names its token_lengths; {REMEDY}")
        files += named
    return files


def _is_object(path: Path) -> bool:
    with open_plain(path, REMEDY) as file:
        return file.read(64).lstrip().startswith(b"{")


def load_columns(
    path: str | Path, names: Sequence[str], absent: Collection[str] = ()
) -> list[list[Any] | NDArray[Any]]:
    """Return the columns `names` of a sizes file, a value a sample: arrays of an `.npz` or of a folder, which stay on
    disk, or fields of a JSON list's rows. Those in `absent` need not be there, and are then 0.

    Raises:
        UserError: naming the file, and the row where a row is at fault.
    """
    path = Path(path)
    if path.suffix == ".npz" or path.is_dir():
        there = [name for name in names if name not in absent or name in column_names(path)]
        if path.is_dir():
            arrays = [map_array(path / f"{name}.npy", REMEDY) for name in there]
        else:
            arrays = read_arrays(path, there, REMEDY)
        found = dict(zip(there, arrays, strict=True))
        for name, array in found.items():
            if array.ndim == 0:
                raise UserError(
                    f"{path}: {name} must be a list, a value for each sample, found {array.shape}; {REMEDY}"
                )
        none = np.broadcast_to(np.int64(0), len(found[there[0]]))
        return [found.get(name, none) for name in names]
    rows = read_json(path, listing(anything, most=MOST_ROWS), REMEDY, MOST_JSON)
    try:
        return [[row.get(name, 0) if name in absent else row[name] for row in rows] for name in names]
    except (KeyError, TypeError, AttributeError):
        needed = [name for name in names if name not in absent]
        row = next(i for i, row in enumerate(rows) if not isinstance(row, dict) or not set(needed) <= set(row))
        wanted = " and ".join(needed)
        raise UserError(f"{path}: row {row}: must be an object with {wanted}, found {shown(rows[row])}") from None


def column_names(path: str | Path) -> tuple[str, ...]:
    """Return the names of the arrays in an `.npz` file or a folder of `.npy`. Raises UserError naming the file."""
    if Path(path).is_dir():
        return tuple(sorted(file.stem for file in Path(path).glob("*.npy")))
    return array_names(path, REMEDY)


def sizes_hash(path: Path, names: Collection[str]) -> str:
    """Return the SHA-256 of a sizes file; of a folder, that of names and hashes of those of its arrays in `names`."""
    if not path.is_dir():
        return sha256_of(path)
    hashes = checksums_of(path, [f"{name}.npy" for name in column_names(path) if name in names])
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """Concatenate arrays: to disk if one is mapped from there; if all are broadcast zeros, without memory."""
    if len(parts) and not any(part.strides[0] for part in parts):
        return np.broadcast_to(parts[0][:1].sum(), sum(map(len, parts)))
    if not any(map(is_mapped, parts)):
        return np.concatenate(parts) if parts else np.zeros(0, dtype)
    whole, first = scratch((sum(map(len, parts)),), np.result_type(*parts), None), 0
    for part in parts:
        for (values,) in in_pieces(part):
            whole[first : first + len(values)] = values
            first += len(values)
            release(whole)
    return whole


def _checked(columns: Mapping[str, NDArray[Any]], origin: str) -> list[NDArray[Any]]:
    """Return the columns as they are. Raises UserError unless they are integers, equally many, in range."""
    tiles, tokens = columns["tiles"], columns["tokens"]
    if tiles.ndim != 1 or tiles.shape != tokens.shape:
        raise UserError(f"{origin}: tiles {tiles.shape} and tokens {tokens.shape} must be two lists of one length")
    for column, (name, values) in enumerate(columns.items()):
        if values.shape != tokens.shape:
            raise UserError(f"{origin}: {name} {values.shape} must be a list as long as tokens {tokens.shape}")
        if len(values) and not np.issubdtype(values.dtype, np.integer):
            raise UserError(f"{origin}: {name} must be whole numbers, found {values.dtype}")
        least = int(column == 1)  # tokens
        bits = 48 if column > 1 else 32  # sums of squares are larger; sums over all samples must fit 64 bits
        for number, (piece,) in enumerate(in_pieces(values)):
            wrong = np.flatnonzero((piece < least) | (piece >= 2 ** (bits - 1)))
            if len(wrong):
                raise UserError(
                    f"{origin}: row {number * PIECE + int(wrong[0])}: {name} is {piece[wrong[0]]}, must be {least} or "
                    f"more and fit {bits} bits"
                )
    return list(columns.values())


def _signed(column: NDArray[Any]) -> NDArray[Any]:
    """Return uint64 values, below 2**47, as int64, and others as they are: numpy joins uint64 and int64 to floats."""
    is_wide = column.dtype.kind == "u" and column.dtype.itemsize == 8
    return column.view(column.dtype.str.replace("u", "i")) if is_wide else column


def _load_one(path: Path, more: Sequence[str], on_disk: bool) -> Sizes:
    own = {} if path.suffix == ".npz" or path.is_dir() else JSON_NAMES
    names = [own.get(name, name) for name in ("tiles", "tokens", *more)]
    columns = load_columns(path, names, [own.get(name, name) for name in FURTHER_SIZES])
    for name, column in zip(names, columns, strict=True):
        if not isinstance(column, list):
            continue
        # A text among numbers would turn the array into texts as wide as the longest.
        odd = next((row for row, value in enumerate(column) if type(value) is not int), None)
        if odd is not None:
            raise UserError(f"{path}: row {odd}: {name} must be whole numbers, found {shown(column[odd])}")
    tiles, tokens, *further = columns
    if on_disk and path.is_dir() and len(tokens) > MAPPED:
        arrays = {name: np.asanyarray(column) for name, column in zip(("tiles", "tokens", *more), columns, strict=True)}
        tiles, tokens, *mapped = map(_signed, _checked(arrays, str(path)))
        return Sizes(tiles, tokens, dict(zip(more, mapped, strict=True)))
    return Sizes.from_arrays(tiles, tokens, str(path), **dict(zip(more, further, strict=True)))
