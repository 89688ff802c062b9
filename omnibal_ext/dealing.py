"""Which rank makes the features of which images, where several share those of a pack.

A unit is what attention of the ViT does not look beyond: a tile, an image at native resolution, a step in time of a
video. Its cost is its tiles, or patches. Who computes it is a function of the pack and of who there is: ranks exchange
nothing. Packs wider than a rank deal so, and a tower beside the pipeline does.
"""

import heapq
from collections.abc import Sequence
from itertools import groupby
from math import gcd


def deal(units: Sequence[int], microbatch: int, ranks: tuple[int, ...], tensor_ranks: int) -> tuple[int, ...]:
    """Of every unit, by its cost, the worker: an index into `ranks` x `tensor_ranks`, tensor ranks vary fastest.

    The costliest unit goes to the least loaded worker (LPT, Graham 1969), ties by number, from another worker on for
    every microbatch: leftovers do not always fall on the same. Units of one cost change places so that neighbours stay
    together: an image's tiles are decoded by few.
    """
    workers = len(ranks) * tensor_ranks
    first = microbatch * _step(workers) % workers
    lightest = [(0, turn) for turn in range(workers)]
    turns = [0] * len(units)
    for _, alike in groupby(sorted(range(len(units)), key=lambda unit: (-units[unit], unit)), units.__getitem__):
        same, taken = list(alike), []
        for unit in same:
            load, turn = lightest[0]
            heapq.heapreplace(lightest, (load + units[unit], turn))
            taken.append(turn)
        for unit, turn in zip(same, sorted(taken), strict=True):
            turns[unit] = turn
    return tuple((first + turn) % workers for turn in turns)


def _step(workers: int) -> int:
    """From one microbatch's first worker to the next one's: near the golden ratio, and in time at every worker."""
    return min(
        (step for step in range(1, workers + 1) if gcd(step, workers) == 1), key=lambda n: abs(n - 0.618 * workers)
    )
