"""Which rank encodes which pieces, where several ranks share the images and sounds of a pack or of a replica.

A piece is what the ViT's attention does not look beyond: a tile, an image at native resolution, a temporal step of a
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

Pieces = tuple[tuple[int, ...], ...]
"""Sizes of the inputs of every piece."""


def piece_costs(pieces: Mapping[Size, Pieces], rates: Mapping[Size, float]) -> tuple[float, ...]:
    """Return the cost of every piece, encoder by encoder; `rates`: cost of one tile, or one mel frame."""
    return tuple(sum(inputs) * rates[size] for size, found in pieces.items() for inputs in found)


def assign_pieces(
    pieces: Sequence[float], microbatch: int, ranks: tuple[int, ...], tensor_ranks: int
) -> tuple[int, ...]:
    """Return for each piece the worker that encodes it: an index into `ranks` x `tensor_ranks`, tensor ranks varying
    fastest.

    The costliest piece goes to the least loaded worker (LPT, Graham 1969). Ties go by number, starting from another
    worker for every microbatch, so that remainders are spread. Pieces of equal cost are then swapped so that
    neighbours, such as the tiles of an image, share a worker.

    Args:
        pieces: cost of each piece.
    """
    workers = len(ranks) * tensor_ranks
    first = microbatch * _step(workers) % workers
    lightest = [(0.0, worker) for worker in range(workers)]
    workers_of = [0] * len(pieces)
    for _, alike in groupby(sorted(range(len(pieces)), key=lambda piece: (-pieces[piece], piece)), pieces.__getitem__):
        same, taken = list(alike), []
        for piece in same:
            load, worker = lightest[0]
            heapq.heapreplace(lightest, (load + pieces[piece], worker))
            taken.append(worker)
        for piece, worker in zip(same, sorted(taken), strict=True):
            workers_of[piece] = worker
    return tuple((first + worker) % workers for worker in workers_of)


@dataclass(frozen=True)
class EncoderRank:
    """A rank of a replica that encodes some of the images and sounds which the replica's ranks share."""

    encoding_ranks: tuple[tuple[int, ...], ...]
    """`encoding_ranks` of the plan's tower."""
    rank: int
    """Pipeline rank."""
    tensor_rank: int
    tensor_ranks: int
    rates: Mapping[Size, float] = field(default_factory=lambda: {VISION.size: 1.0})
    """`rates` of the plan's tower."""

    def takes(self, pieces: tuple[float, ...], microbatch: int) -> list[bool]:
        """Return for each piece of a microbatch's pack, by its cost (`piece_costs`), if this rank encodes it."""
        ranks = encoding_ranks_of(self.encoding_ranks, microbatch)
        if self.rank not in ranks:
            return [False] * len(pieces)
        index = ranks.index(self.rank) * self.tensor_ranks + self.tensor_rank
        return [worker == index for worker in assign_pieces(pieces, microbatch, ranks, self.tensor_ranks)]


def encoding_ranks_of(encoding_ranks: tuple[tuple[int, ...], ...], microbatch: int) -> tuple[int, ...]:
    """Return the pipeline ranks that encode a microbatch: the plan's list has them by number, and is repeated."""
    return encoding_ranks[microbatch % len(encoding_ranks)]


def _step(workers: int) -> int:
    """Return how far the first worker moves from microbatch to microbatch: coprime to `workers`, about .618 of them."""
    return min(
        (step for step in range(1, workers + 1) if gcd(step, workers) == 1), key=lambda n: abs(n - 0.618 * workers)
    )
