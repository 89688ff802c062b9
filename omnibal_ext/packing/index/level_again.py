"""An index levelled again, for another number of ranks: a file beside its arrays, made in seconds.

The packs of an iteration are chosen so that as many ranks as the index was packed for cost the same. At another
data-parallel size the same packs are regrouped: within the iterations that are left of the running epoch, and within
each later epoch, so that every epoch still runs each of its packs once.

    levelled-16x2-next_epoch.npy    int64: the iteration from which on it holds, the pack that runs in each stored place
                                    [P] of later epochs, the packs of the iterations that were left of the running one
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.errors import UserError
from omnibal_ext.files.locks import working_on
from omnibal_ext.packing.index.epoch_order import EpochOrder
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import WAIT
from omnibal_ext.packing.ordering.deal_to_ranks import stored_order
from omnibal_ext.packing.ordering.level_ranks import level_ranks
from omnibal_ext.packing.ordering.order_iterations import order_iterations
from omnibal_ext.reading.arrays import map_array

EFFORT = 1.0  # nominal seconds; counts steps
REMEDY = "remove it and level the index again"


class Levelled(NamedTuple):
    """Which packs run where from an iteration on."""

    since: int
    places: Ints  # [P] the pack in each stored place, in epochs that begin later
    rest: Ints  # packs of the whole groups that were left of the running epoch, from the iteration `since` on


class Ranks(NamedTuple):
    """Who runs the packs, and how epochs end: what a levelled order is for."""

    data_parallel_size: int
    micro_batches: int
    last_iteration: str

    def path(self, index: PackedIndex) -> Path:
        """Where an index keeps the order for these ranks."""
        return index.folder / f"levelled-{self.data_parallel_size}x{self.micro_batches}-{self.last_iteration}.npy"


def read_levelled(index: PackedIndex, ranks: Ranks) -> Levelled | None:
    """Read what `write_levelled` wrote, if there is any. Raises UserError where it is something else."""
    path = ranks.path(index)
    if not path.exists():
        return None
    values, packs = np.array(map_array(path, REMEDY)), index.num_packs
    whole = values.dtype == np.int64 and values.ndim == 1 and len(values) > packs and values[0] >= 0
    if not whole or not np.array_equal(np.sort(values[1 : packs + 1]), np.arange(packs)):
        raise UserError(f"{path}: is no order of the {packs} packs of this index; {REMEDY}")
    return Levelled(int(values[0]), values[1 : packs + 1], values[packs + 1 :])


def write_levelled(index: PackedIndex, ranks: Ranks, levelled: Levelled) -> Path:
    """Write an order beside the arrays of its index, in one step. Raises UserError if another one is there."""
    path = ranks.path(index)
    with working_on(path):
        found = read_levelled(index, ranks)
        if found is not None and found.since != levelled.since:
            raise UserError(
                f"{path}: holds from iteration {found.since} on, not {levelled.since}, and a run that obeys it would "
                "change its order: remove it first if none does"
            )
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.save(file, np.concatenate([[levelled.since], levelled.places, levelled.rest]), allow_pickle=False)
        part.replace(path)
    return path


def level_again(index: PackedIndex, order: EpochOrder, ranks: Ranks, since: int = 0) -> Levelled:
    """Regroup the packs of an index for other ranks, from the iteration `since` on: a function of its arguments.

    1. Packs of each part of each stored epoch, among themselves, for the epochs that begin at `since` or later.
    2. Those of the whole groups that are left of the epoch that is running then, part by part.
    """
    places = np.arange(index.num_packs)
    for first, parts in zip(order.ends, order.parts, strict=False):
        whole = np.arange(first, first + sum(parts) * order.global_batch).reshape(-1, order.global_batch)
        for own in np.split(whole, np.cumsum(parts)[:-1]):
            places[own] = _regrouped(index, own, ranks)
    left = order.left_of_the_epoch(since)
    rest = [_regrouped(index, part, ranks).ravel() for part in left]
    return Levelled(since, places, np.concatenate([np.zeros(0, np.int64), *rest]))


def _regrouped(index: PackedIndex, groups: Ints, ranks: Ranks) -> Ints:
    """Put the packs of whole groups into groups whose ranks are level again, [G, B].

    What groups should have as much of as each other are the loads, samples and sources of their packs.
    """
    packs = groups.ravel()
    if len(groups) < 2:
        return groups
    seconds, features = index.seconds(packs), _features(index, packs)
    seed, limit = int(index.manifest["seed"]), float(index.manifest.get("wait", WAIT))
    of_ranks = level_ranks(seconds, ranks.micro_batches, seed, EFFORT)
    dealt = order_iterations(seconds, features, of_ranks, ranks.data_parallel_size, limit, seed, EFFORT)
    return packs[stored_order(dealt)]


def _features(index: PackedIndex, packs: Ints) -> Floats:
    """Return what packs differ in, of mean 0 and deviation 1, [packs, F]."""
    counts = np.diff(index.pack_offsets)[packs].astype(np.float64)
    ends = np.cumsum([source["samples"] for source in index.manifest["sources"]])
    numbers = np.searchsorted(ends, np.asarray(index.sample_ids), side="right")
    own = [np.add.reduceat(numbers == source, index.pack_offsets[:-1])[packs] for source in range(len(ends))]
    shares = [each - each.sum() / counts.sum() * counts for each in own[:-1]]  # that of the last says nothing more
    values = np.column_stack([np.asarray(index.loads)[packs].astype(np.float64), counts, *shares])
    deviations = values.std(axis=0)
    varies = deviations > 1e-9 * np.maximum(1.0, np.abs(values).max(axis=0))
    return np.ascontiguousarray((values[:, varies] - values[:, varies].mean(axis=0)) / deviations[varies])
