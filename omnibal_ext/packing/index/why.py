"""Why a sample is in its pack: where that runs, what else is in it, and what of its budgets is left; from an index."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.errors import UserError
from omnibal_ext.large_arrays import in_pieces, pieces
from omnibal_ext.modalities.modality import LANGUAGE, VISION, Budgets
from omnibal_ext.packing.held_out import HeldOut
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import REMEDY, PackedIndex
from omnibal_ext.packing.packs import ATTENTION
from omnibal_ext.reading.checks import integer, record, text
from omnibal_ext.reading.document import read_lines
from omnibal_ext.sizes import Sizes

LEFT_OUT = record({"sample": integer(), "reason": text, "detail": text})


@dataclass(frozen=True)
class PlacedPack:
    """A pack of an index, and where it runs first."""

    index: PackedIndex
    pack: int
    epoch: int
    iteration: int
    """Counted from 0 over all epochs, of the data-parallel size and microbatches of the index."""
    ranks: tuple[int, ...]
    """Data-parallel ranks that run it, several for a wide pack."""
    micro_batch: int

    @cached_property
    def samples(self) -> list[int]:
        """Sample numbers, in order."""
        found: list[int] = self.index.samples(self.pack).tolist()
        return found

    @property
    def loads(self) -> dict[str, int]:
        """Units of each size in the pack, all ranks together; without attention's work."""
        loads = dict(zip(self.index.load_names, self.index.loads[self.pack].tolist(), strict=True))
        del loads[self.index.load_names[ATTENTION]]
        return loads

    @property
    def budgets(self) -> Budgets:
        """Most units of each limited size: one rank's budget times the ranks that share the pack."""
        return {size: len(self.ranks) * budget for size, budget in _budgets(self.index).items()}

    @property
    def used(self) -> list[tuple[str, int, int]]:
        """Triples (size, units in the pack, most units) of each limited size."""
        return [(size, self.loads[size], budget) for size, budget in self.budgets.items()]

    @property
    def reasons(self) -> list[str]:
        """Sentences for people: which budget the pack fills most, and why fewer ranks would not hold it."""
        fullest, load, budget = max(self.used, key=lambda used: used[1] / used[2])
        if load > budget:
            return [f"over its budget, {load:,} {fullest} of {budget:,}: alone, by --oversize alone"]
        found = [f"{fullest} fill it most: {load:,} of {budget:,}, which leaves {budget - load:,}"]
        if len(self.ranks) > 1:
            narrower = [width for width in self.index.widths if width < len(self.ranks)][-1]
            over = narrower * budget // len(self.ranks)
            found.append(f"on {narrower} rank{'s' * (narrower > 1)} at most {over:,} {fullest} run together")
        return found


@dataclass(frozen=True)
class Answer:
    """What an index says of a sample."""

    sample: int
    source: str
    row: int
    """Row of the sample in its source, counted from 0."""
    sizes: dict[str, int]
    """The sample's own; empty if they are not known."""
    packs: list[PlacedPack]
    """Packs in order of dispatch; several where an epoch repeats the sample, or the index stores several epochs."""
    left_out: str
    """Why it is in no pack; empty if it is in one."""

    def to_record(self) -> dict[str, Any]:
        """Return the object that `omnibal pack --why --json` prints."""
        fields = ("pack", "epoch", "iteration", "ranks", "micro_batch", "samples", "loads", "budgets", "reasons")
        packs = [{name: getattr(placed, name) for name in fields} for placed in self.packs]
        of = {"sample": self.sample, "source": self.source, "row": self.row, "sizes": self.sizes}
        return {**of, "packs": packs, "left_out": self.left_out}


def why(index: PackedIndex, sample: str, sizes: Sizes | None = None) -> Answer:
    """Return where an index has a sample: in which packs, run when, how full; or why in none.

    Args:
        sample: its number in the corpus, or SOURCE:ROW, with a source's path or the last part of it; both from 0.
        sizes: of all samples, if they are known.

    Raises:
        UserError: the corpus has no such sample.
    """
    number, source, row = _find(index, sample)
    packs = _placed(index, _packs_with(index, number))
    own = {size: int(sizes.of(size)[number]) for size in _budgets(index)} if sizes is not None else {}
    return Answer(number, source, row, own, packs, "" if packs else _why_left_out(index, number))


def _find(index: PackedIndex, sample: str) -> tuple[int, str, int]:
    """Return a sample's number, its source and its row there. Raises UserError if there is none, or several."""
    named, _, digits = sample.rpartition(":")
    sources = [(source["name"], source["samples"]) for source in index.manifest["sources"]]
    wanted = int(digits) if digits.isdecimal() else -1
    first, found = 0, []
    for name, count in sources:
        row = wanted if named else wanted - first
        if named in ("", name, PurePath(name).name) and 0 <= row < count:
            found.append((first + row, name, row))
        first += count
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{name} of {count:,}" for name, count in sources)
    raise UserError(
        f"--why {sample}: {index.folder} has {'several' if found else 'no such sample'}; give a number below "
        f"{first:,}, or SOURCE:ROW of {known}"
    )


def _packs_with(index: PackedIndex, sample: int) -> list[int]:
    """Return the packs that have a sample, ascending."""
    found: list[int] = []
    for piece, (ids,) in zip(pieces(len(index.sample_ids)), in_pieces(index.sample_ids), strict=True):
        found_at = piece.start + np.flatnonzero(ids == sample)
        found += (np.searchsorted(index.pack_offsets, found_at, side="right") - 1).tolist()
    return sorted(set(found))


def _placed(index: PackedIndex, packs: list[int]) -> list[PlacedPack]:
    """Return packs, each with the iteration and microbatch in which it runs first."""
    ranks, found = int(index.manifest.get("data_parallel_size", 1)), dict[int, PlacedPack]()
    stream = PackStream(index, ranks, index.global_batch // ranks)
    for first, slots in _iterations(stream, index):
        for pack in (pack for pack in packs if pack not in found):
            found_at = np.argwhere(slots == pack)  # in the order of iterations
            if len(found_at):
                (iteration, _, micro_batch), number = found_at[0].tolist(), first + int(found_at[0, 0])
                of_ranks = tuple(found_at[found_at[:, 0] == iteration, 1].tolist())
                found[pack] = PlacedPack(index, pack, stream.epoch_of(number), number, of_ranks, micro_batch)
        if len(found) == len(packs):
            break
    return [found[pack] for pack in packs]


def _iterations(stream: PackStream, index: PackedIndex) -> Iterator[tuple[int, Ints]]:
    """Yield the stored epochs' iterations, some at a time: the first one's number, and their packs [I, D, M]."""
    end = stream.first_iteration(len(index.manifest["epoch_packs"]))
    step = max(1, 65536 // index.global_batch)
    for first in range(0, end, step):
        yield first, stream.iterations(first, min(first + step, end))


def _budgets(index: PackedIndex) -> Budgets:
    """Return one rank's budgets that the index was packed with, of sizes that have one."""
    manifest = index.manifest
    limits = {VISION.size: manifest["sample_vit_budget"], LANGUAGE.size: manifest["sample_llm_budget"]}
    limits |= {size: budget for size, budget in manifest.get("budgets", {}).items() if size in index.load_names}
    return {size: budget for size, budget in limits.items() if budget}


def _why_left_out(index: PackedIndex, sample: int) -> str:
    """Return why a sample is in no pack."""
    for line in read_lines(index.folder / "rejected.jsonl", LEFT_OUT, REMEDY):
        if line["sample"] == sample:
            return f"{line['reason']}: {line['detail']}"
    drawn = index.manifest["built_from"].get("held_out")
    if drawn:
        held = HeldOut(**drawn)
        samples = sum(source["samples"] for source in index.manifest["sources"])
        if held.draw(samples)[sample] != held.packed:
            return "not held out: this index has the held-out samples" if held.packed else "held out, by --held-out"
    return "its source's weight is below 1, and none of the stored epochs draws it"
