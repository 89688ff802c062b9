"""Which packs run at which position of training, for ever: every epoch has each of its packs once.

An index stores one or several epochs, each as groups of one global batch that belong together, then the packs that
fill no group. Where packs may be wider than a rank these are seats, all of them in groups. Epochs beyond the stored
ones go through these again, in an order of their own:

    stored   G0 G1 G2 G3 | r r r                    groups of B packs, and R < B others
    epoch e  a a | G3 G0 G2 | a a a r r r           group A = G1 opened: its first packs fill the last iteration of
             head  shuffled   tail                  epoch e - 1, which had opened another one

So no pack runs twice in one iteration, unless an epoch has fewer packs than an iteration.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Ints

EMPTY_PACK = -1  # stands for a pack of zero weight: no samples, no loss


class EpochOrder:
    """The pack at each position, as a function of the position alone."""

    def __init__(
        self,
        epoch_packs: Sequence[int],
        global_batch: int,
        seed: int,
        whole_iterations: bool,
        epoch_parts: Sequence[Sequence[int]] = (),
    ) -> None:
        """With `whole_iterations` an epoch ends with `EMPTY_PACK`s up to a whole iteration, else where its packs end.

        Args:
            epoch_packs: packs of each stored epoch, all above 0.
            epoch_parts: of each stored epoch, the groups in each of its parts, among which groups are shuffled; groups
                beyond these stay behind them. Without, a stored epoch is one part.
        """
        self.global_batch = global_batch
        self.ends = np.cumsum([0, *epoch_packs])
        self._seed = seed
        self._whole = whole_iterations
        self.parts = [list(parts) for parts in epoch_parts] or [[packs // global_batch] for packs in epoch_packs]
        lengths = np.array(epoch_packs)
        if whole_iterations:
            lengths = -(-lengths // global_batch) * global_batch
        self._starts = np.cumsum([0, *lengths])
        self._order = lru_cache(maxsize=2)(self._epoch)

    @classmethod
    def of_manifest(cls, manifest: Mapping[str, Any], last_iteration: str) -> "EpochOrder":
        """Return the order of an index's packs, where epochs end as `last_iteration` says."""
        return cls(
            manifest.get("epoch_seats", manifest["epoch_packs"]),
            int(manifest["global_batch"]),
            int(manifest["seed"]),
            last_iteration == "empty",
            manifest.get("epoch_parts", ()),
        )

    def start_of(self, epoch: int) -> int:
        """Return the position where an epoch starts."""
        cycle, section = divmod(epoch, len(self.ends) - 1)
        return cycle * int(self._starts[-1]) + int(self._starts[section])

    def first_iteration(self, epoch: float) -> int:
        """Return the first iteration that starts in an epoch; of half an epoch more, the first in its second half."""
        whole = int(epoch)
        start, end = self.start_of(whole), self.start_of(whole + 1)
        return -(-(start + round((epoch - whole) * (end - start))) // self.global_batch)

    def epoch_at(self, position: int) -> int:
        """Return the epoch that holds a position."""
        cycle, rest = divmod(position, int(self._starts[-1]))
        return cycle * (len(self.ends) - 1) + int(np.searchsorted(self._starts, rest, side="right")) - 1

    def packs(self, first: int, end: int) -> Ints:
        """Return the packs at positions `first` to `end` - 1."""
        parts, position = [np.zeros(0, np.int64)], first
        while position < end:
            epoch = self.epoch_at(position)
            start = self.start_of(epoch)
            parts.append(self._order(epoch)[position - start : end - start])
            position += len(parts[-1])
        return np.concatenate(parts)

    def left_of_the_epoch(self, iteration: int) -> list[Ints]:
        """Return the whole groups, [G, B], that an epoch in which an iteration starts has left then, part by part.

        None at the start of an epoch.
        """
        batch, start = self.global_batch, iteration * self.global_batch
        epoch = self.epoch_at(start)
        if start == self.start_of(epoch):
            return []
        section = epoch % (len(self.ends) - 1)
        groups = self.packs(start, max(start, self.start_of(epoch + 1) // batch * batch)).reshape(-1, batch)
        groups = groups[: int(np.append(self.are_groups(groups), False).argmin())]
        numbers = (groups[:, 0] - self.ends[section]) // batch
        part = np.searchsorted(np.cumsum(self.parts[section]), numbers, side="right")
        return np.split(groups, np.flatnonzero(np.diff(part)) + 1)

    def are_groups(self, iterations: Ints) -> NDArray[np.bool_]:
        """Return which iterations, packs [I, B], are a group as it is stored, [I]."""
        first = iterations[:, 0]
        section = np.searchsorted(self.ends, first, side="right") - 1
        aligned = (first >= 0) & ((first - self.ends[section]) % self.global_batch == 0)
        aligned &= first + self.global_batch <= self.ends[np.minimum(section + 1, len(self.ends) - 1)]
        result: NDArray[np.bool_] = aligned & (np.diff(iterations, axis=1) == 1).all(axis=1)
        return result

    def _epoch(self, epoch: int) -> Ints:
        """Order the packs of one epoch: every pack once, groups kept together.

        1. Shuffle the groups of each part, from the second time on; the stored order is random already.
        2. Where the iteration before is open, open a group and put its first packs there.
        3. What remains of it and of the packs in no group comes last.
        """
        batch, (cycle, section) = self.global_batch, divmod(epoch, len(self.ends) - 1)
        first, end = int(self.ends[section]), int(self.ends[section + 1])
        whole = (end - first) // batch
        groups = np.arange(first, first + whole * batch).reshape(whole, batch)
        rest = np.arange(first + whole * batch, end)
        missing = -self.start_of(epoch) % batch
        if whole < 2 and not self._whole:
            return np.arange(first, end)  # in one order for ever, so that no iteration meets a pack again too soon
        order = np.arange(whole)
        if cycle:
            borders = np.cumsum(self.parts[section])
            generator = np.random.default_rng((self._seed, epoch))
            order = np.concatenate([generator.permutation(part) for part in np.split(order, borders)])
        if self._whole:
            return np.concatenate([groups[order].ravel(), rest, np.full(-len(rest) % batch, EMPTY_PACK)])
        opened = self._opened(section, cycle, whole)
        if missing == 0:
            return np.concatenate([groups[order].ravel(), rest])
        closed = groups[order[order != opened]].ravel()
        return np.concatenate([groups[opened][:missing], closed, groups[opened][missing:], rest])

    def _opened(self, section: int, cycle: int, whole: int) -> int:
        """Return the group that an epoch opens; the next epoch of the same packs opens another one."""
        generator = np.random.default_rng((self._seed, 3, section))
        return int(generator.permutation(whole)[cycle % whole])
