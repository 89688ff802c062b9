"""Where samples and packs are while they change places: samples in packs, packs on ranks.

owners   0 0 1 1 1 2        sample 3 is in pack 1,
ranks    4 4 0              which rank 0 runs, counted through all iterations
"""

from typing import NamedTuple

import numba
import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.packing.packs import Packs, offsets_of


class Places(NamedTuple):
    """Samples are numbered as their packs held them at first."""

    owners: Ints  # [N] the pack of each sample
    counts: Ints  # [P] samples
    loads: Ints  # [P, K] sizes that have a budget
    ranks: Ints  # [P] which runs the pack, counted through all iterations, or -1
    kin: Ints  # [P] only packs of the same number exchange samples


def places_of(packs: Packs, sizes: Ints, ranks: Ints, kin: Ints) -> Places:
    """Return where things stand; `sizes` [N, K] are those of `packs.sample_ids`."""
    owners = np.repeat(np.arange(len(packs)), packs.counts)
    return Places(owners, packs.counts, np.add.reduceat(sizes, packs.pack_offsets[:-1]), ranks, kin)


def packs_of(places: Places, sample_ids: Ints) -> Packs:
    """Return the packs as things stand now."""
    return Packs(offsets_of(places.counts), sample_ids[np.argsort(places.owners, kind="stable")])


@numba.njit(cache=True)
def still_fit(places: Places, sizes: Ints, budgets: Ints, here: int, there: int, gone: int, come: int) -> bool:
    """Whether both packs keep the budgets if a sample that is `gone` from the pack `here` goes for another one."""
    for size in range(len(budgets)):
        more = sizes[come, size] - sizes[gone, size]
        if places.loads[here, size] + more > budgets[size] or places.loads[there, size] - more > budgets[size]:
            return False
    return True


@numba.njit(cache=True)
def put(places: Places, sizes: Ints, sample: int, to: int) -> None:
    """Put a sample into another pack."""
    pack = places.owners[sample]
    places.owners[sample] = to
    places.counts[pack] -= 1
    places.counts[to] += 1
    for size in range(sizes.shape[1]):
        places.loads[pack, size] -= sizes[sample, size]
        places.loads[to, size] += sizes[sample, size]
