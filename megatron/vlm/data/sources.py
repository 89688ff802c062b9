"""Input files of a dataset: short names, and the file of each sample."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.reading.stores import StorePath, located_in_file, named_stores


class Sources:
    """A dataset's input files, and the file of each sample."""

    def __init__(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Take the manifest's `sources`: file and number of samples of each input, in the samples' order."""
        files = list(dict.fromkeys(str(entry["file"]) for entry in entries))
        self.names = short_names(files)
        self._ends = np.cumsum([entry["samples"] for entry in entries])
        self._numbers = np.array([files.index(str(entry["file"])) for entry in entries])
        self._entries, self._stores = entries, named_stores()  # which data workers do not have

    @property
    def are_stored(self) -> bool:
        """Whether images or sounds of any lie in a store. Raises as `places`."""
        return any(isinstance(path, StorePath) for entry in self._entries for path in self._places(entry))

    def entry(self, sample: int) -> Mapping[str, Any]:
        """Return the manifest's entry of a sample's input file."""
        found: Mapping[str, Any] = self._entries[int(np.searchsorted(self._ends, sample, side="right"))]
        return found

    def refuse_foreign(self) -> None:
        """Raise UserError if images or sounds of any lie in a store that the command line does not name."""
        for entry in self._entries:
            self._places(entry)

    def places(self, sample: int) -> tuple[Path, Path]:
        """Return the input file of a sample, and the root of its media. Raises UserError if one lies in a store that
        the command line does not name."""
        return self._places(self.entry(sample))

    def _places(self, entry: Mapping[str, Any]) -> tuple[Path, Path]:
        path, root = (located_in_file(entry[name] or "", self._stores) for name in ("path", "image_root"))
        return path, root

    def of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index in `names` of each sample's input file."""
        return self._numbers[np.searchsorted(self._ends, samples, side="right")]


def short_names(files: Sequence[str]) -> tuple[str, ...]:
    """Return each file's name without suffix, preceded by as many parent folders as make the names distinct.

    a/train.jsonl, b/train.jsonl, b/more.jsonl: a/train, b/train, more
    """
    paths = [PurePath(file).with_suffix("").parts for file in files]
    names = []
    for parts in paths:
        length = next((n for n in range(1, len(parts)) if [p[-n:] for p in paths].count(parts[-n:]) == 1), len(parts))
        names.append("/".join(parts[-length:]))
    return tuple(names)
