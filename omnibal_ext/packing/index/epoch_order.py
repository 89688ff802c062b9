"""Which pack runs at which position of training: every epoch runs each of its packs once.

An index stores one or more epochs, each as groups (the B packs of one iteration) and R < B leftover packs. Where packs
may be wider than a rank, slots take the place of packs, all of them in groups. Later epochs repeat the stored ones in a
new order:

    stored   G0 G1 G2 G3 | r r r               groups of B packs, then R leftover packs
    epoch e  a a | G3 G0 G2 | a a a r r r      group A = G1 is split: its first packs complete the last iteration of
             head  shuffled   tail             epoch e - 1, its other packs come last with the leftover

So no pack runs twice in one iteration, unless an epoch has fewer packs than an iteration.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Ints
from omnibal_ext.packing.packs import EMPTY_PACK


class EpochOrder:
    """Which pack runs at each position, counted through all iterations: B positions an iteration."""

    def __init__(
        self,
        epoch_packs: Sequence[int],
        global_batch: int,
        seed: int,
        complete_iterations: bool,
        epoch_parts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Take each stored epoch's packs, and its sub-epochs' iterations (`epoch_parts`); `complete_iterations`: the
        last iteration is filled with `EMPTY_PACK`."""
        self.global_batch = global_batch
        self.ends = np.cumsum([0, *epoch_packs])
        self._seed = seed
        self._complete = complete_iterations
        self.sub_epochs = [list(sub_epochs) for sub_epochs in epoch_parts] or [
            [packs // global_batch] for packs in epoch_packs
        ]
        lengths = np.array(epoch_packs)
        if complete_iterations:
            lengths = -(-lengths // global_batch) * global_batch
        self._starts = np.cumsum([0, *lengths])
        self._arranged = lru_cache(maxsize=2)(self._arrange)

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any], last_iteration: str) -> "EpochOrder":
        """Return the order of an index's packs for a value of `--last-iteration`."""
        return cls(
            manifest.get("epoch_seats", manifest["epoch_packs"]),
            int(manifest["global_batch"]),
            int(manifest["seed"]),
            last_iteration == "empty",
            manifest.get("epoch_parts", ()),
        )

    def start_of(self, epoch: int) -> int:
        """Return the position at which an epoch begins."""
        cycle, section = divmod(epoch, len(self.ends) - 1)
        return cycle * int(self._starts[-1]) + int(self._starts[section])

    def first_iteration(self, epoch: float) -> int:
        """Return the first iteration that starts in an epoch; `epoch` may be a fraction: 1.5 is the middle of 1."""
        full_epochs = int(epoch)
        start, end = self.start_of(full_epochs), self.start_of(full_epochs + 1)
        return -(-(start + round((epoch - full_epochs) * (end - start))) // self.global_batch)

    def epoch_at(self, position: int) -> int:
        """Return the epoch to which a position of training belongs."""
        cycle, rest = divmod(position, int(self._starts[-1]))
        return cycle * (len(self.ends) - 1) + int(np.searchsorted(self._starts, rest, side="right")) - 1

    def packs(self, first: int, end: int) -> Ints:
        """Return the packs at positions `first` to `end` - 1."""
        found, position = [np.zeros(0, np.int64)], first
        while position < end:
            epoch = self.epoch_at(position)
            start = self.start_of(epoch)
            found.append(self._packs(epoch, position - start, end - start))
            position += len(found[-1])
        return np.concatenate(found)

    def remaining_groups(self, iteration: int) -> list[Ints]:
        """Return stored iterations' packs [G, B] still to run in the epoch of `iteration`, one array per sub-epoch.

        Empty at the start of an epoch.
        """
        batch, start = self.global_batch, iteration * self.global_batch
        epoch = self.epoch_at(start)
        if start == self.start_of(epoch):
            return []
        section = epoch % (len(self.ends) - 1)
        groups = self.packs(start, max(start, self.start_of(epoch + 1) // batch * batch)).reshape(-1, batch)
        groups = groups[: int(np.append(self.are_groups(groups), False).argmin())]
        numbers = (groups[:, 0] - self.ends[section]) // batch
        sub_epoch = np.searchsorted(np.cumsum(self.sub_epochs[section]), numbers, side="right")
        return np.split(groups, np.flatnonzero(np.diff(sub_epoch)) + 1)

    def are_groups(self, iterations: Ints) -> NDArray[np.bool_]:
        """Return whether each iteration, given as packs [I, B], is one that is stored as such: [I]."""
        first = iterations[:, 0]
        section = np.searchsorted(self.ends, first, side="right") - 1
        aligned = (first >= 0) & ((first - self.ends[section]) % self.global_batch == 0)
        aligned &= first + self.global_batch <= self.ends[np.minimum(section + 1, len(self.ends) - 1)]
        result: NDArray[np.bool_] = aligned & (np.diff(iterations, axis=1) == 1).all(axis=1)
        return result

    def _packs(self, epoch: int, first: int, end: int) -> Ints:
        """Return the packs at positions `first` to `end` - 1 of an epoch, counted in it, or to its last."""
        (head, order, tail), batch = self._arranged(epoch), self.global_batch
        within = np.arange(*np.clip((first - len(head), end - len(head)), 0, len(order) * batch))
        groups = self.ends[epoch % (len(self.ends) - 1)] + order[within // batch] * batch + within % batch
        behind = len(head) + len(order) * batch
        return np.concatenate([head[first:end], groups, tail[max(0, first - behind) : max(0, end - behind)]])

    def _arrange(self, epoch: int) -> tuple[Ints, Ints, Ints]:
        """Return an epoch's first packs, the order of its groups, numbered within it, and its last packs.

        1. From the second pass over the stored epochs on, shuffle the groups of each sub-epoch; the stored order is
           random already.
        2. If the last epoch ended within an iteration, split a group and complete that iteration with its first packs.
        3. The rest of that group and the leftover packs come last.
        """
        batch, (cycle, section) = self.global_batch, divmod(epoch, len(self.ends) - 1)
        start, end = int(self.ends[section]), int(self.ends[section + 1])
        complete, missing = (end - start) // batch, -self.start_of(epoch) % batch
        order, rest = np.arange(complete), np.arange(start + complete * batch, end)
        if complete < 2 and not self._complete:
            return order[:0], order, rest  # in a fixed order, so that no pack repeats too soon
        if cycle:
            parts = np.split(order, np.cumsum(self.sub_epochs[section]))
            generator = np.random.default_rng((self._seed, epoch))
            order = np.concatenate([generator.permutation(part) for part in parts])
        if self._complete:
            rest = np.append(rest, np.full(-len(rest) % batch, EMPTY_PACK))
        if missing == 0:
            return order[:0], order, rest
        # The next epoch of the same packs splits another group.
        opened = int(opened_groups(self._seed, section, complete)[cycle % complete])
        split = start + opened * batch + np.arange(batch)
        return split[:missing], order[order != opened], np.concatenate([split[missing:], rest])


def opened_groups(seed: int, section: int, complete: int) -> Ints:
    """Return the numbers of an epoch's `complete` groups, in the order in which its first, second... run splits one."""
    return np.random.default_rng((seed, 3, section)).permutation(complete)
