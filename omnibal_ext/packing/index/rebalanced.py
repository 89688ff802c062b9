"""An index rebalanced for another number of ranks (`omnibal level`): a file next to its arrays, made in seconds.

Iterations are chosen so that the ranks the index was packed for have equal work. For another data-parallel size the
same packs are regrouped within the remaining iterations of the running epoch and within each later epoch, so every
epoch still runs each of its packs once.

    levelled-16x2-next_epoch.npy    int64: the first iteration it applies to, the pack at each stored position [P] in
                                    later epochs, the packs of the running epoch's remaining complete groups
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.errors import UserError
from omnibal_ext.files.locks import working_on
from omnibal_ext.files.writing import replacing
from omnibal_ext.packing.index.epoch_order import EpochOrder
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import WAIT
from omnibal_ext.packing.ordering.balance_ranks import balance_ranks, stored_order
from omnibal_ext.packing.ordering.order_iterations import order_iterations
from omnibal_ext.packing.ordering.spread import Features
from omnibal_ext.reading.arrays import map_array

EFFORT = 1.0  # nominal seconds, see `balance_ranks`
REMEDY = "remove it and run omnibal level again"


class Rebalanced(NamedTuple):
    """An order of an index's packs for other ranks, from iteration `since` on."""

    since: int
    pack_at: Ints  # [P] pack at each stored position, in epochs that begin later
    remaining: Ints  # packs of the running epoch's remaining complete groups, from iteration `since` on

    def packs(self, order: EpochOrder, first: int, groups: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the packs that run instead of `groups` [I, B], of iterations `first`, `first` + 1..., and which of
        these are balanced for these ranks, [I]."""
        batch = order.global_batch
        positions, packs = first * batch + np.arange(groups.size), groups.ravel().copy()
        start, epoch = self.since * batch, order.epoch_at(self.since * batch)
        begins = order.start_of(epoch)  # the first epoch that begins at `since` or later
        later = positions >= (begins if begins == start else order.start_of(epoch + 1))
        swapped = later & (packs >= 0)
        packs[swapped] = self.pack_at[packs[swapped]]
        rest = (positions >= start) & (positions < start + len(self.remaining))
        packs[rest] = self.remaining[positions[rest] - start]
        return packs.reshape(-1, batch), np.all((later | rest).reshape(groups.shape), axis=1)


class RankLayout(NamedTuple):
    """The ranks that a rebalanced order is for, and how epochs end."""

    data_parallel_size: int
    micro_batches: int
    last_iteration: str

    def path(self, index: PackedIndex) -> Path:
        """Return where an index has the order for these ranks, whether it is there or not."""
        return index.folder / f"levelled-{self.data_parallel_size}x{self.micro_batches}-{self.last_iteration}.npy"


def read_rebalanced(index: PackedIndex, ranks: RankLayout) -> Rebalanced | None:
    """Read the file of `write_rebalanced`; None if there is none. Raises UserError if it is no such order."""
    path = ranks.path(index)
    if not path.exists():
        return None
    values, packs = np.array(map_array(path, REMEDY)), index.num_packs
    complete = values.dtype == np.int64 and values.ndim == 1 and len(values) > packs and values[0] >= 0
    if not complete or not np.array_equal(np.sort(values[1 : packs + 1]), np.arange(packs)):
        raise UserError(f"{path}: is no order of the {packs} packs of this index; {REMEDY}")
    return Rebalanced(int(values[0]), values[1 : packs + 1], values[packs + 1 :])


def write_rebalanced(index: PackedIndex, ranks: RankLayout, new: Rebalanced) -> Path:
    """Write an order next to the index's arrays, atomically. Raises UserError if one starts at another iteration."""
    path = ranks.path(index)
    with working_on(path):
        found = read_rebalanced(index, ranks)
        if found is not None and found.since != new.since:
            raise UserError(
                f"{path}: starts at iteration {found.since}, not {new.since}; replacing it would change the order of "
                "a run that uses it: remove it if none does"
            )
        with replacing(path) as file:
            np.save(file, np.concatenate([[new.since], new.pack_at, new.remaining]), allow_pickle=False)
    return path


def rebalance(index: PackedIndex, order: EpochOrder, ranks: RankLayout, since: int = 0) -> Rebalanced:
    """Regroup the packs of an index for other ranks from iteration `since` on; equal arguments give equal results.

    1. For epochs that begin at `since` or later: regroup the packs within each sub-epoch of each stored epoch.
    2. For the epoch running at `since`: regroup its remaining complete groups within each sub-epoch.
    """
    pack_at = np.arange(index.num_packs)
    for first, sub_epochs in zip(order.ends, order.sub_epochs, strict=False):
        complete = np.arange(first, first + sum(sub_epochs) * order.global_batch).reshape(-1, order.global_batch)
        for groups in np.split(complete, np.cumsum(sub_epochs)[:-1]):
            pack_at[groups] = _regrouped(index, groups, ranks)
    left = order.remaining_groups(since)
    remaining = [_regrouped(index, groups, ranks).ravel() for groups in left]
    return Rebalanced(since, pack_at, np.concatenate([np.zeros(0, np.int64), *remaining]))


def _regrouped(index: PackedIndex, groups: Ints, ranks: RankLayout) -> Ints:
    """Regroup packs [G, B] for balanced ranks, and groups with similar loads, samples and sources: [G, B]."""
    packs = groups.ravel()
    if len(groups) < 2:
        return groups
    seconds, features = index.seconds(packs), _features(index, packs)
    seed, limit = int(index.manifest["seed"]), float(index.manifest.get("wait", WAIT))
    of_ranks = balance_ranks(seconds, ranks.micro_batches, seed, EFFORT)
    slots = order_iterations(seconds, features, of_ranks, ranks.data_parallel_size, limit, seed, EFFORT)
    return packs[stored_order(slots)]


def _features(index: PackedIndex, packs: Ints) -> Floats:
    """Return loads, samples and sources of packs, each with mean 0 and standard deviation 1: [packs, F]."""
    counts = np.diff(index.pack_offsets)[packs].astype(np.float64)
    ends = np.cumsum([source["samples"] for source in index.manifest["sources"]])
    numbers = np.searchsorted(ends, np.asarray(index.sample_ids), side="right")
    of_sources = [np.add.reduceat(numbers == source, index.pack_offsets[:-1])[packs] for source in range(len(ends))]
    excess = [each - each.sum() / counts.sum() * counts for each in of_sources[:-1]]  # the last follows from the others
    values = np.column_stack([np.asarray(index.loads)[packs].astype(np.float64), counts, *excess])
    found = Features(values, values.shape[1], [], np.zeros((len(packs), 0), np.bool_))
    return found.scaled(found.deviations())
