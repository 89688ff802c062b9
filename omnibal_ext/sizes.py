"""What samples cost: how many ViT tiles and how many LLM tokens each one has."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError


@dataclass(frozen=True, slots=True)
class Sizes:
    """The two sizes of every sample of a corpus; sample i is row i of both arrays.

    `tokens` counts what the LLM reads, image tokens included. A text-only sample has 0 tiles.
    """

    tiles: NDArray[np.int32]  # [N]
    tokens: NDArray[np.int64]  # [N]

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, samples: NDArray[np.int64]) -> "Sizes":
        """Return the sizes of `samples`, in that order; a sample may be named several times."""
        return Sizes(self.tiles[samples], self.tokens[samples])

    @classmethod
    def from_arrays(cls, tiles: Any, tokens: Any, origin: str = "sizes") -> "Sizes":
        """Check two integer arrays of one length and make them sizes.

        Raises:
            UserError: naming `origin` and the first row at fault.
        """
        tiles, tokens = np.asarray(tiles), np.asarray(tokens)
        if tiles.ndim != 1 or tiles.shape != tokens.shape:
            raise UserError(f"{origin}: tiles {tiles.shape} and tokens {tokens.shape} must be two lists of one length")
        for name, values, least in (("tiles", tiles, 0), ("tokens", tokens, 1)):
            if len(values) and not np.issubdtype(values.dtype, np.integer):
                raise UserError(f"{origin}: {name} must be whole numbers, found {values.dtype}")
            wrong = np.flatnonzero((values < least) | (values > np.iinfo(np.int32).max))
            if len(wrong):
                row = int(wrong[0])
                raise UserError(
                    f"{origin}: row {row}: {name} is {values[row]}, must be {least} or more and fit 32 bits"
                )
        return cls(tiles.astype(np.int32), tokens.astype(np.int64))

    @classmethod
    def load(cls, paths: Sequence[str | Path] | str | Path) -> "Sizes":
        """Read `.json` or `.npz` files of sizes; several are one corpus, numbered from 0 in the order given.

        A JSON file is a list of `{"vit_num": tiles, "token_num": tokens, ...}`, an `.npz` holds `tiles` and `tokens`.

        Raises:
            UserError: naming the file, and the row where a row is at fault.
        """
        if isinstance(paths, str | Path):
            paths = [paths]
        return cls.concatenate([_load_one(Path(path)) for path in paths])

    @classmethod
    def concatenate(cls, parts: Sequence["Sizes"]) -> "Sizes":
        """Put corpora one after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.tiles for part in parts]) if parts else np.zeros(0, np.int32),
            np.concatenate([part.tokens for part in parts]) if parts else np.zeros(0, np.int64),
        )

    def save(self, path: str | Path, **columns: NDArray[Any]) -> None:
        """Write an `.npz` that `load` reads; `columns` [N] are what else there is to say about the samples."""
        np.savez(path, allow_pickle=False, tiles=self.tiles, tokens=self.tokens, **columns)


def load_columns(path: str | Path, names: Sequence[str]) -> list[list[Any] | NDArray[Any]]:
    """Read columns of a sizes file, one value a sample: arrays of an `.npz`, fields of the rows of a JSON list.

    Raises:
        UserError: naming the file, and the row where a row is at fault.
    """
    path = Path(path)
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                missing = next((name for name in names if name not in arrays), None)
                if missing is not None:
                    raise UserError(f"{path}: has no array {missing!r}; it has {', '.join(arrays)}")
                return [arrays[name] for name in names]
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # malformed JSON, not UTF-8, or not an .npz
        raise UserError(f"{path}: is not a sizes file: {error}") from error
    if not isinstance(rows, list):
        raise UserError(f'{path}: must be a JSON list of {{"vit_num": tiles, "token_num": tokens}}')
    try:
        return [[row[name] for row in rows] for name in names]
    except (KeyError, TypeError):
        row = next(i for i, row in enumerate(rows) if not isinstance(row, dict) or not set(names) <= set(row))
        wanted = " and ".join(names)
        raise UserError(f"{path}: row {row}: must be an object with {wanted}, found {rows[row]!r:.80}") from None


def column_names(path: str | Path) -> tuple[str, ...]:
    """Return the arrays of an `.npz` file of sizes. Raises UserError naming the file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return tuple(arrays)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: is not a sizes file: {error}") from error


def _load_one(path: Path) -> Sizes:
    if path.suffix == ".npz":
        tiles, tokens = load_columns(path, ("tiles", "tokens"))
        return Sizes.from_arrays(tiles, tokens, str(path))
    tiles, tokens = load_columns(path, ("vit_num", "token_num"))
    try:
        return Sizes.from_arrays(tiles, tokens, str(path))
    except (ValueError, OverflowError) as error:
        raise UserError(f"{path}: vit_num and token_num must be whole numbers: {error}") from error
