"""One phase of a step: which rank takes which samples, so that the fullest one has the least.

Two ways in which a phase runs its batch (OrchMLLM, arXiv 2503.23830, tells of both and prints neither):

    packed   samples end to end, each sees itself alone: the seconds of a batch are the sum of its samples'
    padded   all samples as long as the longest: the seconds are their number times those of the longest
"""

import heapq
import math
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.costs import PackCosts

MOST_TRIES = 2_000_000
"""Ways to divide samples of two ranks that are looked at: what a plan may take is milliseconds."""
MOST_DIVIDED = 10
"""Samples of two ranks that are divided in every way there is; of more, one is swapped for one."""
LEAST_GAIN = 1e-4
"""Of the mean rank: what a change must take off the fullest one."""
MOST_HALVINGS = 100


class Phase(NamedTuple):
    """What a sample of n units (patches, tokens) takes: `linear` n + `quadratic` n^2 seconds."""

    linear: float
    quadratic: float = 0.0
    padded: bool = False

    def seconds(self, units: NDArray[np.generic]) -> Floats:
        """Of each sample alone."""
        lengths = units.astype(np.float64)
        return self.linear * lengths + self.quadratic * lengths**2

    def deal(self, units: NDArray[np.generic], ranks: int) -> Ints:
        """The batch, from 0 to `ranks` - 1, of each of N samples: int64 [N]."""
        seconds = self.seconds(units)
        return level_padded(seconds, ranks) if self.padded else level(seconds, ranks)

    def of_batches(self, units: NDArray[np.generic], batch: Ints, ranks: int) -> Floats:
        """Seconds of each batch, [ranks]."""
        seconds = self.seconds(units)
        if not self.padded:
            return np.bincount(batch, seconds, ranks).astype(np.float64)  # of no sample they are whole
        longest = np.zeros(ranks)
        np.maximum.at(longest, batch, seconds)
        return longest * np.bincount(batch, minlength=ranks)


def phases_of(costs: PackCosts) -> dict[str, Phase]:
    """What a sample takes of a model for images and text: of its tiles in `vision`, of its tokens in `language`."""
    vision, language = costs.parts["vision"], costs.parts["language"]
    return {"vision": Phase(vision["tiles"]), "language": Phase(language["tokens"], language["attention"])}


def level(seconds: Floats, ranks: int) -> Ints:
    """Deal samples so that the fullest rank has little more than the mean, or than the longest sample: rank [N].

    1. The longest first, each to the lightest rank: within 4/3 - 1/(3 ranks) of the best (Graham, 1969).
    2. As long as the fullest rank has less then, and the other not as much, it and a lighter one divide their samples
       anew: in the best of all ways where they are few, else a sample is swapped for one.
    """
    order = np.lexsort((np.arange(len(seconds)), -seconds))
    return _level(np.ascontiguousarray(seconds, np.float64), order, ranks)


def level_padded(seconds: Floats, ranks: int) -> Ints:
    """Deal samples so that number x longest of the fullest rank is least: rank [N]. `seconds` are of samples alone.

    Some best batches are runs of the samples sorted by length: of two batches the one with the longer longest can take
    the longest of both, as many as it has. The least bound with which so many runs suffice is found by bisection.
    """
    order = np.lexsort((np.arange(len(seconds)), -seconds))
    falling = np.ascontiguousarray(seconds[order], np.float64)
    low, high = 0.0, float(falling[0]) * len(falling) if len(falling) else 0.0
    best = _runs(falling, high)
    for _ in range(MOST_HALVINGS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        found = _runs(falling, middle)
        if len(found) and found[-1] < ranks:
            best, high = found, middle
        else:
            low = middle
    places = np.empty(len(seconds), np.int64)
    places[order] = best
    return places


@numba.njit(cache=True)
def _level(seconds: Floats, order: Ints, ranks: int) -> Ints:
    loads, counts = np.zeros(ranks), np.zeros(ranks, np.int64)
    members = np.empty((ranks, len(seconds)), np.int32)
    lightest = [(0.0, rank) for rank in range(ranks)]
    for sample in order:
        rank = lightest[0][1]
        members[rank, counts[rank]] = sample
        counts[rank] += 1
        loads[rank] += seconds[sample]
        heapq.heapreplace(lightest, (loads[rank], rank))
    tries, worth = MOST_TRIES, LEAST_GAIN * loads.mean()
    changed = True
    while changed and tries > 0:
        full, changed = int(np.argmax(loads)), False
        for light in np.argsort(loads, kind="mergesort"):
            together = counts[full] + counts[light]
            if light == full or tries <= 0:
                continue
            if together <= MOST_DIVIDED:
                tries -= 1 << together
                changed = _divide(full, light, worth, seconds, loads, counts, members)
            else:
                tries -= counts[full] * counts[light]
                changed = _swap(full, light, worth, seconds, loads, counts, members)
            if changed:
                break
    place = np.zeros(len(seconds), np.int64)
    for rank in range(ranks):
        place[members[rank, : counts[rank]]] = rank
    return place


@numba.njit(cache=True)
def _divide(full: int, light: int, worth: float, seconds: Floats, loads: Floats, counts: Ints, members: Ints) -> bool:
    """Bring two ranks nearest to each other of all ways to divide their samples; False as `_swap`."""
    split = counts[full]
    both = np.concatenate((members[full, :split], members[light, : counts[light]]))
    whole, had = loads[full] + loads[light], 0.0
    best, chosen, now = loads[full] - worth, -1, 0
    for number in range(1, 1 << len(both)):  # by Gray's code: a sample changes sides from one to the next
        turned = 0
        while not number >> turned & 1:
            turned += 1
        now ^= 1 << turned
        had += seconds[both[turned]] * (1.0 if now >> turned & 1 else -1.0)
        if max(had, whole - had) < best:
            best, chosen = max(had, whole - had), now
    if chosen < 0:
        return False
    for rank, here in ((full, 1), (light, 0)):
        counts[rank], loads[rank] = 0, 0.0
        for place, sample in enumerate(both):
            if chosen >> place & 1 == here:
                members[rank, counts[rank]] = sample
                counts[rank] += 1
                loads[rank] += seconds[sample]
    return True


@numba.njit(cache=True)
def _swap(full: int, light: int, worth: float, seconds: Floats, loads: Floats, counts: Ints, members: Ints) -> bool:
    """Bring two ranks nearest to each other by a swap; False where the fuller one keeps all but `worth`."""
    apart = loads[full] - loads[light]
    best, mine, other = worth, -1, -1
    for i in range(counts[full]):
        for j in range(counts[light]):
            less = seconds[members[full, i]] - seconds[members[light, j]]
            gain = min(less, apart - less)  # both ranks end below the fuller one by so much
            if gain > best:
                best, mine, other = gain, i, j
    if mine < 0:
        return False
    given, taken = members[full, mine], members[light, other]
    members[full, mine], members[light, other] = taken, given
    loads[full] += seconds[taken] - seconds[given]
    loads[light] += seconds[given] - seconds[taken]
    return True


@numba.njit(cache=True)
def _runs(falling: Floats, bound: float) -> Ints:
    """Cut samples, the longest first, into runs as long as `bound` allows: run [N]; [0] where one alone is too long."""
    run = np.empty(len(falling), np.int64)
    first, number = 0, 0
    while first < len(falling):
        if falling[first] > bound:
            return run[:0]
        longest = falling[first]
        left = len(falling) - first
        count = left if longest * left <= bound else math.floor(bound / longest)
        run[first : first + count] = number
        first += count
        number += 1
    return run
