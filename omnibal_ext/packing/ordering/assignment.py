"""The assignment of samples to packs and of packs to ranks, which exchanges of samples change.

pack_of   0 0 1 1 1 2      sample 3 is in pack 1,
rank_of   4 4 0            which rank 0 runs (ranks counted through all iterations)
"""

from typing import NamedTuple

import numba
import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.packing.packs import PackList, offsets_of


class Assignment(NamedTuple):
    """The pack of each sample and the rank of each pack. Samples are numbered in the initial order of the packs."""

    pack_of: Ints  # [N] the pack of each sample
    counts: Ints  # [P] number of samples
    loads: Ints  # [P, K] sizes that have a budget
    rank_of: Ints  # [P] rank, counted through all iterations; -1: none
    exchange_groups: Ints  # [P] only packs of the same number exchange samples


def assignment_of(packs: PackList, sizes: Ints, rank_of: Ints, exchange_groups: Ints) -> Assignment:
    """Return the assignment of `packs`; `sizes` [N, K] are those of `packs.sample_ids`."""
    pack_of = np.repeat(np.arange(len(packs)), packs.counts)
    return Assignment(pack_of, packs.counts, np.add.reduceat(sizes, packs.pack_offsets[:-1]), rank_of, exchange_groups)


def packs_of(assignment: Assignment, sample_ids: Ints) -> PackList:
    """Return the packs of an assignment; `sample_ids` [N]: numbers that its samples have in the corpus."""
    return PackList(offsets_of(assignment.counts), sample_ids[np.argsort(assignment.pack_of, kind="stable")])


@numba.njit(cache=True)
def move_sample(assignment: Assignment, sizes: Ints, sample: int, to: int) -> None:
    """Move a sample to pack `to`, in place; loads and counts of both packs follow."""
    pack = assignment.pack_of[sample]
    assignment.pack_of[sample] = to
    assignment.counts[pack] -= 1
    assignment.counts[to] += 1
    for size in range(sizes.shape[1]):
        assignment.loads[pack, size] -= sizes[sample, size]
        assignment.loads[to, size] += sizes[sample, size]
