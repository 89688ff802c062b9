"""One phase of a step: assigns samples to ranks so that the slowest rank takes as few seconds as possible.

A phase runs its batch in one of two ways (both from OrchMLLM, arXiv 2503.23830, which prints neither algorithm):

    packed   samples end to end, each attends to itself: a batch's seconds are the sum of its samples'
    padded   all samples as long as the longest: seconds are their number times those of the longest
"""

import heapq
import math
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.modalities.modality import ALWAYS, IN_CHAIN
from omnibal_ext.packing.costs import PackCosts

MOST_TRIED = 2_000_000
"""Most divisions of two ranks' samples tried, so that a plan takes milliseconds."""
MOST_DIVIDED = 10
"""Up to so many samples of two ranks are divided exhaustively; with more, only single samples are swapped."""
LEAST_GAIN = 1e-4
"""Least reduction of the slowest rank's seconds by a change, as a fraction of the mean rank's."""
MOST_HALVINGS = 100


class Phase(NamedTuple):
    """Seconds of a sample of n units (patches, tokens) in a phase: `linear` n + `quadratic` n^2."""

    linear: float
    quadratic: float = 0.0
    padded: bool = False

    def seconds(self, units: NDArray[np.generic]) -> Floats:
        """Return the seconds of each sample alone, [N]."""
        lengths = units.astype(np.float64)
        return self.linear * lengths + self.quadratic * lengths**2

    def assign(self, units: NDArray[np.generic], ranks: int) -> Ints:
        """Divide N samples into `ranks` batches, the slowest as fast as possible; return each one's batch: int64
        [N]."""
        seconds = self.seconds(units)
        return assign_padded(seconds, ranks) if self.padded else assign_packed(seconds, ranks)

    def of_batches(self, units: NDArray[np.generic], batch: Ints, ranks: int) -> Floats:
        """Return the seconds of each batch, [ranks]; `batch` [N] is the number of each sample's."""
        seconds = self.seconds(units)
        if not self.padded:
            return np.bincount(batch, seconds, ranks).astype(np.float64)  # without samples bincount returns integers
        longest = np.zeros(ranks)
        np.maximum.at(longest, batch, seconds)
        return longest * np.bincount(batch, minlength=ranks)


def phases_of(costs: PackCosts) -> dict[str, Phase]:
    """Return the phases of a model by the names of its modalities, in the order of the chain: `audio`, if it hears, by
    a sample's mel frames, `vision` by its tiles, `language` by its tokens."""
    parts = [(one, costs.parts[one.name]) for one in IN_CHAIN if one in ALWAYS or one.name in costs.parts]
    return {one.name: Phase(part[one.size], part.get("attention", 0.0)) for one, part in parts}


def assign_packed(seconds: Floats, ranks: int) -> Ints:
    """Assign samples so that the slowest rank takes little more than the mean, or the longest sample: rank [N].

    1. Longest first, each to the least loaded rank: within 4/3 - 1/(3 ranks) of the optimum (Graham, 1969).
    2. While it lowers the maximum, redistribute the samples of the fullest rank and a lighter one: optimally if they
       are few, else by swapping one sample for one.
    """
    order = np.lexsort((np.arange(len(seconds)), -seconds))
    return _level(np.ascontiguousarray(seconds, np.float64), order, ranks)


def assign_padded(seconds: Floats, ranks: int) -> Ints:
    """Assign samples so that the maximum over ranks of count x longest sample is minimal: rank [N].

    `seconds`: of each sample alone. There are optimal batches that are runs of the samples sorted by length: of two
    batches, the one with the longer maximum can take the longest samples of both, as many as it had. Bisection finds
    the least bound for which `ranks` runs suffice.
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
    rank_of = np.empty(len(seconds), np.int64)
    rank_of[order] = best
    return rank_of


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
    tries, worth = MOST_TRIED, LEAST_GAIN * loads.mean()
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
    rank_of = np.zeros(len(seconds), np.int64)
    for rank in range(ranks):
        rank_of[members[rank, : counts[rank]]] = rank
    return rank_of


@numba.njit(cache=True)
def _divide(full: int, light: int, worth: float, seconds: Floats, loads: Floats, counts: Ints, members: Ints) -> bool:
    """Divide two ranks' samples as equally as possible, in place; False, unchanged, if that gains `worth` at most."""
    split = counts[full]
    both = np.concatenate((members[full, :split], members[light, : counts[light]]))
    total, had = loads[full] + loads[light], 0.0
    best, chosen, now = loads[full] - worth, -1, 0
    for number in range(1, 1 << len(both)):  # in Gray code, one sample changes sides per step
        turned = 0
        while not number >> turned & 1:
            turned += 1
        now ^= 1 << turned
        had += seconds[both[turned]] * (1.0 if now >> turned & 1 else -1.0)
        if max(had, total - had) < best:
            best, chosen = max(had, total - had), now
    if chosen < 0:
        return False
    for rank, here in ((full, 1), (light, 0)):
        counts[rank], loads[rank] = 0, 0.0
        for position, sample in enumerate(both):
            if chosen >> position & 1 == here:
                members[rank, counts[rank]] = sample
                counts[rank] += 1
                loads[rank] += seconds[sample]
    return True


@numba.njit(cache=True)
def _swap(full: int, light: int, worth: float, seconds: Floats, loads: Floats, counts: Ints, members: Ints) -> bool:
    """Swap one sample of each of two ranks to make them most equal; False, unchanged, if that gains `worth` at most."""
    gap = loads[full] - loads[light]
    best, mine, other = worth, -1, -1
    for i in range(counts[full]):
        for j in range(counts[light]):
            less = seconds[members[full, i]] - seconds[members[light, j]]
            gain = min(less, gap - less)  # both ranks are then at least so far below the slower one
            if gain > best:
                best, mine, other = gain, i, j
    if mine < 0:
        return False
    leaving, arriving = members[full, mine], members[light, other]
    members[full, mine], members[light, other] = arriving, leaving
    loads[full] += seconds[arriving] - seconds[leaving]
    loads[light] += seconds[leaving] - seconds[arriving]
    return True


@numba.njit(cache=True)
def _runs(falling: Floats, bound: float) -> Ints:
    """Divide samples, longest first, into runs as long as `bound` allows: run [N]; empty if one sample exceeds it."""
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
