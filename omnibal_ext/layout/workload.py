"""Packs that a layout is judged on: some iterations of the stream that training will run."""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Ints
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import FURTHER, MODALITIES, Size
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import EMPTY_PACK, PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.pack_epoch import Pack, pack, pack_epoch
from omnibal_ext.packing.packs import PackList, pack_loads
from omnibal_ext.sizes import Sizes


def packs_of_index(index: PackedIndex, profile: Profile, microbatches: int, iterations: int = 4) -> PackSizes:
    """Return sizes of packs of iterations spread over epoch 0: int64 [iterations, data-parallel ranks, microbatches].

    Raises UserError if `microbatches` does not divide the index's global batch, or a budget exceeds the profile's.
    """
    if index.global_batch % microbatches:
        raise UserError(
            f"{index.folder}: packed for a global batch of {index.global_batch} packs, which --num-microbatches "
            f"{microbatches} does not divide: pack again, or plan for a divisor"
        )
    for one in MODALITIES:
        if (packed := index.budgets.get(one.size, 0)) > (most := profile.budget(one.size)):
            raise UserError(
                f"{index.folder}: packed for {one.budget} {packed}, but profiled at {most}: "
                "profile again at the index's budgets"
            )
    stream = PackStream(index, index.global_batch // microbatches, microbatches)
    order = np.stack([stream.iteration(int(i)) for i in _spread(stream.iterations_per_epoch, iterations)])
    loads, wide = np.asarray(index.rank_loads), index.wide and index.wide.pack_widths
    return packs_of_loads(loads, order, index.exchanged, wide, further_columns(index.load_names))


def further_columns(names: Sequence[str]) -> dict[Size, int]:
    """Return {size: column} of the sizes besides images' and words' in a table of loads with these column names."""
    return {one.size: names.index(one.size) for one in FURTHER if one.size in names}


def _spread(of: int, count: int) -> Ints:
    """Return the numbers in the middle of `count` equal parts of range(of); all numbers if there are no more."""
    parts = min(count, of)
    return ((np.arange(parts) + 0.5) * of / parts).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Workload:
    """Some iterations of a packed corpus."""

    packs: PackSizes
    """Sizes that the devices run, padding included: [iterations, data-parallel ranks, microbatches]."""
    needed: PackSizes
    """Sizes of the same packs without padding."""
    vit_budget: int
    llm_budget: int


@dataclass(frozen=True, slots=True)
class PackedCorpus:
    """A corpus packed as training would run it."""

    loads: Ints
    """[packs, 3 or more] Tiles, tokens and sum of squared lengths that the devices run, padding included; further
    sizes."""
    needed: Ints
    """`loads` without padding."""
    samples: Ints
    """[packs] Samples of each."""
    iterations: Ints
    """[iterations, data-parallel ranks, microbatches] Pack numbers of the first epoch."""
    vit_budget: int
    llm_budget: int
    further: Mapping[Size, int] = field(default_factory=dict)
    """Columns of `loads` that have further sizes, such as mel frames."""

    @property
    def mean_samples(self) -> float:
        """Mean number of samples in an iteration, over all data-parallel ranks."""
        return float(self.samples[self.iterations[self.iterations != EMPTY_PACK]].sum() / len(self.iterations))

    def workload(self, iterations: int) -> Workload:
        """Return the packs of so many iterations, from equal parts of the epoch; of all if there are no more."""
        chosen = self.iterations[_spread(len(self.iterations), iterations)]
        packs = packs_of_loads(self.loads, chosen, further=self.further)
        needed = packs_of_loads(self.needed, chosen, further=self.further)
        return Workload(packs, needed, self.vit_budget, self.llm_budget)


def pack_corpus(sizes: Sizes, options: PackOptions, make: Pack = pack, costs: PackCosts | None = None) -> PackedCorpus:
    """Pack a corpus as training would, `costs` as in `build_index`. Raises UserError as packing does."""
    with tempfile.TemporaryDirectory() as folder:
        path, packer = Path(folder) / "index", partial(pack_epoch, make=make)
        index, _ = build_index(sizes, path, options, costs=costs, packer=packer)
        stream = PackStream(index, options.data_parallel_size, options.micro_batches)
        needed = pack_loads(PackList(np.asarray(index.pack_offsets), np.asarray(index.sample_ids)), sizes)
        order, counts = stream.iterations(0, stream.iterations_per_epoch), np.diff(index.pack_offsets)
        budgets, further = (index.vit_budget, index.llm_budget), further_columns(index.load_names)
        return PackedCorpus(np.array(index.loads), needed, counts, order, *budgets, further)


def packed_once() -> Pack:
    """Return `pack` with a cache: packs that do not depend on ranks and microbatches are made once for all of them."""
    known: dict[tuple[str, bytes], PackList] = {}

    def make(sizes: Sizes, options: PackOptions, seed: int) -> PackList:
        kept = options  # of a device group packs are for the ranks of an iteration
        if options.method != "device_group":
            kept = replace(options, micro_batches=1, data_parallel_size=1, seconds=0.0)
        columns: list[NDArray[Any]] = [sizes.tiles, sizes.tokens, *sizes.more.values()]
        key = str((kept, seed)), hashlib.sha256(b"".join(column.tobytes() for column in columns)).digest()
        if key not in known:
            known[key] = pack(sizes, options, seed)
        return known[key]

    return make


def packs_of_loads(
    loads: Ints,
    iterations: Ints,
    exchanged: Ints | None = None,
    widths: Ints | None = None,
    further: Mapping[Size, int] | None = None,
) -> PackSizes:
    """Return sizes of the packs numbered int64 [iterations, ranks, microbatches]; empty packs have size 0, width 1.

    `loads` int64 [packs, 3 or more]: tiles, tokens, sum of squared lengths, in columns `further` other sizes, of a wide
    pack a rank's; `exchanged` [packs]: tokens that a rank sends; `widths` [packs].
    """
    empty = iterations == EMPTY_PACK
    sizes = np.where(empty[..., None], 0, loads[iterations])
    sent = None if exchanged is None else np.where(empty, 0, exchanged[iterations])
    wide = None if widths is None else np.where(empty, 1, widths[iterations])
    tiles, tokens, squares = (np.ascontiguousarray(sizes[..., column]) for column in range(3))
    more = {size: np.ascontiguousarray(sizes[..., column]) for size, column in (further or {}).items()}
    return PackSizes(tiles, tokens, squares, sent, wide, more)
