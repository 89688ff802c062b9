"""The packed index on disk: written once, memory-mapped, checked by hash.

manifest.json       version, counts, budgets, seed, hashes of what it was built from, checksums of the arrays
pack_offsets.npy    int64 [P + 1]
sample_ids.npy      int64 [N]
pack_loads.npy      int64 [P, K]: tiles, tokens, sum(length^2) and further sizes of each pack, padding included
rejected.jsonl      one line per sample left out, with the reason

Version 4, whose packs may be wider than a rank, has three more arrays:

pack_widths.npy     int64 [P]: neighbouring data-parallel ranks that run each pack
pack_seats.npy      int64 [S]: a table [D, M] per iteration: the pack in each slot, -1: none; wide packs have several
share_loads.npy     int64 [P, K + 1]: loads of the fullest shard of each pack, and the tokens that its rank sends

Version 1 has three loads, and epochs of one sub-epoch; from version 3 on the manifest has its own hash.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.files.folders import TAKE_ANOTHER, building, refuse_without_manifest
from omnibal_ext.files.records import checksums_of, verify_checksums, write_record
from omnibal_ext.files.writing import replacing
from omnibal_ext.identity import content_of, differences
from omnibal_ext.large_arrays import growing_array, in_pieces
from omnibal_ext.modalities.modality import MODALITIES, Budgets
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.manifest import VERSION, WIDE, check_manifest
from omnibal_ext.packing.packs import LOADS, LoadedPacks
from omnibal_ext.packing.shard_loads import EXCHANGED
from omnibal_ext.reading.arrays import map_array
from omnibal_ext.reading.document import read_json, sealed

REMEDY = "pack again with omnibal pack"


class WidePackArrays(NamedTuple):
    """The index's arrays of wide packs: widths, slots, loads of shards. Each is in a file of its name."""

    pack_widths: NDArray[np.int64]
    pack_seats: NDArray[np.int64]
    share_loads: NDArray[np.int64]


class PackedIndex:
    """An open index. Opening reads the manifest and the pack offsets; all arrays are memory-mapped."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.pack_offsets = _map(folder, "pack_offsets", (manifest["packs"] + 1,))
        self.sample_ids = _map(folder, "sample_ids", (manifest["samples"],))
        self.load_names = tuple(manifest.get("loads", LOADS))
        self.loads = _map(folder, "pack_loads", (manifest["packs"], len(self.load_names)))
        costs = manifest.get("costs")
        self.costs = PackCosts.from_record(costs) if costs else PackCosts.of_model()
        ends = self.pack_offsets[[0, -1]].tolist()
        follow = in_pieces(self.pack_offsets[:-1], self.pack_offsets[1:])
        if ends != [0, manifest["samples"]] or not all((first < end).all() for first, end in follow):
            raise UserError(
                f"{folder / 'pack_offsets.npy'}: packs do not follow each other to the last sample; {REMEDY}"
            )
        self.wide = _wide_arrays(folder, manifest, self.loads.shape) if "epoch_seats" in manifest else None
        for name, loads in (("pack_loads", self.loads), ("share_loads", self.wide and self.wide.share_loads)):
            least = 0 if loads is None else min((int(each.min()) for (each,) in in_pieces(loads)), default=0)
            if least < 0:
                raise UserError(f"{folder / name}.npy: a load is {least}, below 0; {REMEDY}")

    @classmethod
    def open(cls, folder: str | Path) -> "PackedIndex":
        """Open a folder that `write_index` made.

        Raises:
            UserError: the folder has no index, one of another version, or arrays that do not match the manifest.
        """
        folder = Path(folder)
        refuse_without_manifest(folder, "a packed index", "omnibal pack")
        return cls(folder, read_json(folder / "manifest.json", check_manifest, REMEDY))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the folder's path alone: a pickled memory map would contain the entire array."""
        return PackedIndex.open, (self.folder,)

    @property
    def num_packs(self) -> int:
        """Packs in the index, over all its stored epochs."""
        return int(self.manifest["packs"])

    @property
    def global_batch(self) -> int:
        """Packs of one iteration: data-parallel ranks x micro-batches."""
        return int(self.manifest["global_batch"])

    @property
    def pad(self) -> bool:
        """Whether samples are padded to the longest of their pack (baselines), instead of concatenated (THD)."""
        return bool(self.manifest["pad"])

    @property
    def vit_budget(self) -> int:
        """Most tiles of a pack."""
        return int(self.manifest["vit_budget"])

    @property
    def llm_budget(self) -> int:
        """Most tokens of a pack, padding included."""
        return int(self.manifest["llm_budget"])

    @property
    def budgets(self) -> Budgets:
        """Most units of each size in a pack: tiles, tokens, and further ones that packs have."""
        further = [one.size for one in MODALITIES if one.size in self.load_names[len(LOADS) :]]
        said = self.manifest.get("budgets", {})
        longest = {size: int(self.loads[:, self.load_names.index(size)].max(initial=0)) for size in further}
        most = {size: max(longest[size], int(said.get(size, 0))) for size in further}
        return {"tiles": self.vit_budget, "tokens": self.llm_budget} | {size: n for size, n in most.items() if n}

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of packs, ascending; (1,) if each pack is run by one rank."""
        return tuple(self.manifest.get("widths", (1,)))

    def width(self, pack: int) -> int:
        """Return how many neighbouring data-parallel ranks run a pack together."""
        return 1 if self.wide is None else int(self.wide.pack_widths[pack])

    @property
    def rank_loads(self) -> NDArray[np.int64]:
        """Loads of each pack on one rank, [P, K]; for a wide pack those of its fullest shard."""
        return self.loads if self.wide is None else self.wide.share_loads[:, :-1]

    @property
    def exchanged(self) -> NDArray[np.int64] | None:
        """Tokens that a rank sends to its team for each pack, [P]; None if no pack is wider than a rank."""
        return None if self.wide is None else self.wide.share_loads[:, -1]

    def seconds(self, packs: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return packs' seconds on their slowest rank, per part of the model or in total: [packs, parts]."""
        loads, names = (self.loads, self.load_names) if self.wide is None else self._of_shares()
        return self.costs.waited_for(np.asarray(loads[packs]), names, bool(self.manifest.get("one_sum")))

    def _of_shares(self) -> tuple[NDArray[np.int64], tuple[str, ...]]:
        assert self.wide is not None
        return self.wide.share_loads, (*self.load_names, EXCHANGED)

    def samples(self, pack: int) -> NDArray[np.int64]:
        """Return the sample numbers of one pack."""
        if not 0 <= pack < self.num_packs:
            raise IndexError(f"pack {pack} of {self.num_packs}")
        return np.asarray(self.sample_ids[self.pack_offsets[pack] : self.pack_offsets[pack + 1]])

    def verify(self) -> None:
        """Compare every file with its checksum in the manifest. Raises UserError naming the file."""
        verify_checksums(self.folder, self.manifest["checksums"], REMEDY)

    def check_samples(self, count: int) -> None:
        """Raise UserError if a pack names a sample beyond the `count` of the dataset."""
        ends = [(int(each.min()), int(each.max())) for (each,) in in_pieces(self.sample_ids)]
        least, most = min((first for first, _ in ends), default=0), max((last for _, last in ends), default=0)
        if ends and not 0 <= least <= most < count:
            odd = least if least < 0 else most
            raise UserError(f"{self.folder / 'sample_ids.npy'}: names sample {odd} of {count}; {REMEDY}")

    def check(self, expected: Mapping[str, Any]) -> None:
        """Compare fields of the manifest with expected values; a nested field is written `built_from.seed`.

        Fields that say where files lie, or are called (`identity.PLACES`), are not compared: files may have been moved.

        Raises:
            UserError: naming the first field that differs (of nested fields the innermost), and both values.
        """
        for field, wanted in expected.items():
            found: Any = self.manifest
            for key in field.split("."):
                found = found.get(key) if isinstance(found, dict) else None
            for how in differences(content_of(found), content_of(wanted), field):
                raise UserError(f"{self.folder}: {how}; pack again")


def write_index(
    folder: str | Path,
    pieces: Iterable[LoadedPacks],
    described: Callable[[], tuple[Mapping[str, Any], WidePackArrays | None]],
    rejected: Iterable[Mapping[str, Any]],
    over: bool = False,
) -> PackedIndex:
    """Write an index and move it to `folder` atomically; return it open.

    Args:
        pieces: packs in order of dispatch; a piece at a time is in memory.
        described: called behind these, returns the manifest's other fields (seed, budgets...), and arrays of wide
            packs.

    Raises:
        UserError: `folder` has other files, or an index with other fields (with `over` that is replaced).
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "pack_offsets.npy").exists():
        raise UserError(f"{folder}: exists and is no packed index; {TAKE_ANOTHER}")
    with building(folder) as new:
        packs = samples = 0
        with (
            growing_array(new / "pack_offsets.npy") as add_ends,
            growing_array(new / "sample_ids.npy") as add_samples,
            growing_array(new / "pack_loads.npy") as add_loads,
        ):
            add_ends(np.zeros(1, np.int64))
            for piece in pieces:
                add_ends(piece.packs.pack_offsets[1:] + samples)
                add_samples(piece.packs.sample_ids)
                add_loads(piece.loads)
                packs, samples = packs + len(piece.packs), samples + len(piece.packs.sample_ids)
        manifest, wide = described()
        for name, rows in (wide._asdict() if wide else {}).items():
            with growing_array(new / f"{name}.npy") as add:
                add(rows)
        with replacing(new / "rejected.jsonl") as file:
            file.writelines(json.dumps(line).encode() + b"\n" for line in rejected)
        written = {"version": WIDE if wide else VERSION, "packs": packs, "samples": samples, **manifest}
        written["checksums"] = checksums_of(new, sorted(path.name for path in new.iterdir()))
        if not over:
            refuse_other(folder, written)
        write_record(new / "manifest.json", sealed(written))
    return PackedIndex.open(folder)


def refuse_other(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Raise UserError if `folder` has an index that differs in a field of `wanted`, but for where files lie."""
    path = folder / "manifest.json"
    if not path.exists():
        return
    found = content_of(read_json(path, check_manifest, TAKE_ANOTHER))
    for how in differences(found, content_of(sealed(wanted))):
        raise UserError(f"{folder}: holds an index made otherwise ({how}); {TAKE_ANOTHER}")


def _wide_arrays(folder: Path, manifest: Mapping[str, Any], shape: tuple[int, ...]) -> WidePackArrays:
    """Map the arrays of version 4. Raises UserError if widths or slots are invalid."""
    packs, slots = manifest["packs"], sum(manifest["epoch_seats"])
    wide = WidePackArrays(
        _map(folder, "pack_widths", (packs,)),
        _map(folder, "pack_seats", (slots,)),
        _map(folder, "share_loads", (packs, shape[1] + 1)),
    )
    if not np.isin(wide.pack_widths, manifest["widths"]).all():
        raise UserError(f"{folder / 'pack_widths.npy'}: has widths that are none of {manifest['widths']}; {REMEDY}")
    known = wide.pack_seats.min() >= -1 and wide.pack_seats.max() < packs  # before any is counted
    if not known or (np.bincount(wide.pack_seats[wide.pack_seats >= 0], minlength=packs) != wide.pack_widths).any():
        raise UserError(f"{folder / 'pack_seats.npy'}: packs do not have a slot on each of their ranks; {REMEDY}")
    return wide


def _map(folder: Path, name: str, shape: tuple[int, ...]) -> NDArray[np.int64]:
    path = folder / f"{name}.npy"
    array = map_array(path, REMEDY)
    if array.shape != shape or array.dtype != np.int64:
        raise UserError(f"{path}: has shape {array.shape} of {array.dtype}, not {shape} of int64; {REMEDY}")
    return array
