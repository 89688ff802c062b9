"""Which rank encodes which units, where several ranks share the images and sounds of a pack or of a replica.

A unit is what the ViT's attention does not look beyond: a tile, an image at native resolution, a temporal step of a
video; or all sounds of a sample, as some encoders pad each to the longest. Its cost is its number of tiles or patches,
for sounds as many tiles as take as long. The assignment is a function of the pack and the ranks, so ranks exchange
nothing. It is used for packs wider than a rank, and for towers outside the pipeline.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import gcd

from omnibal_ext.modalities.modality import VISION, Size

Units = tuple[tuple[int, ...], ...]
"""Sizes of the inputs of every unit."""


def unit_costs(units: Mapping[Size, Units], rates: Mapping[Size, float]) -> tuple[float, ...]:
    """Return the cost of every unit, of one encoder's after the other's; `rates`: of one tile or mel frame each."""
    return tuple(sum(inputs) * rates[size] for size, found in units.items() for inputs in found)


def assign_units(units: Sequence[float], microbatch: int, ranks: tuple[int, ...], tensor_ranks: int) -> tuple[int, ...]:
    """Return the worker of each unit: an index into `ranks` x `tensor_ranks`, tensor ranks varying fastest.

    The costliest unit goes to the least loaded worker (LPT, Graham 1969). Ties go by number, starting from another
    worker for every microbatch, so that remainders are spread. Units of equal cost are then swapped so that neighbours,
    such as the tiles of an image, share a worker.

    Args:
        units: cost of each unit.
    """
    workers = len(ranks) * tensor_ranks
    first = microbatch * _step(workers) % workers
    lightest = [(0.0, worker) for worker in range(workers)]
    workers_of = [0] * len(units)
    for _, alike in groupby(sorted(range(len(units)), key=lambda unit: (-units[unit], unit)), units.__getitem__):
        same, taken = list(alike), []
        for unit in same:
            load, worker = lightest[0]
            heapq.heapreplace(lightest, (load + units[unit], worker))
            taken.append(worker)
        for unit, worker in zip(same, sorted(taken), strict=True):
            workers_of[unit] = worker
    return tuple((first + worker) % workers for worker in workers_of)


@dataclass(frozen=True)
class EncoderRank:
    """A rank of a replica, which encodes some of its images and sounds."""

    parts: tuple[tuple[int, ...], ...]
    """`parts` of the plan's tower."""
    rank: int
    """Pipeline rank."""
    tensor_rank: int
    tensor_ranks: int
    rates: Mapping[Size, float] = field(default_factory=lambda: {VISION.size: 1.0})
    """`rates` of the plan's tower."""

    def takes(self, units: tuple[float, ...], microbatch: int) -> list[bool]:
        """Return for each of a pack's units (by its cost, `unit_costs`) whether this rank encodes it."""
        ranks = parts_of(self.parts, microbatch)
        if self.rank not in ranks:
            return [False] * len(units)
        index = ranks.index(self.rank) * self.tensor_ranks + self.tensor_rank
        return [worker == index for worker in assign_units(units, microbatch, ranks, self.tensor_ranks)]


def parts_of(parts: tuple[tuple[int, ...], ...], microbatch: int) -> tuple[int, ...]:
    """Return the pipeline ranks that encode a microbatch; beyond the plan's list it is repeated."""
    return parts[microbatch % len(parts)]


def _step(workers: int) -> int:
    """Return the distance of the first workers of successive microbatches: coprime to `workers`, about .618 of them."""
    return min(
        (step for step in range(1, workers + 1) if gcd(step, workers) == 1), key=lambda n: abs(n - 0.618 * workers)
    )
