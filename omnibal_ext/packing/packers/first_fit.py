"""First-fit-decreasing in any number of sizes: each sample, largest first, into the first pack with room for it.

A tree over the packs holds the most room of each size that a pack below has, so that the first fit is found without
looking at all packs (Johnson, 1974). Work and memory grow with the samples, not with how many sizes differ.
"""

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.packs import Packs, offsets_of

PART = 100_000  # samples that are packed together: the more packs there are, the longer it takes to find the first fit


def pack_first_fit(sizes: Ints, budgets: Ints, seed: int = 0) -> Packs:
    """Pack all samples; each must fit the budgets alone.

    1. Deal the samples at random into parts of `PART` at most; all that this costs is the last pack of each.
    2. Sort those of a part, largest first: by the largest share of a budget, the sum of shares, the sum weighted with
       how scarce each budget is, and each share alone.
    3. Put each into the first pack that has room in every size, else into a new one.
    4. Keep the order that needs the fewest packs; other parts, which are alike, go in that order.

    Args:
        sizes: [N, K].
        budgets: [K]; a budget of 0 is of a size that no sample has.
    """
    if len(sizes) == 0:
        return Packs.concatenate([])
    parts = np.array_split(np.random.default_rng(seed).permutation(len(sizes)), -(-len(sizes) // PART))
    first, *others = [np.sort(part) for part in parts]
    shares = sizes / np.maximum(budgets, 1)
    keys = [shares.max(axis=1)]
    if sizes.shape[1] > 1:
        keys += [shares @ shares.sum(axis=0), shares.sum(axis=1), *shares.T]
    tried = [_pack_part(sizes, budgets, first, key) for key in keys]
    best = min(range(len(keys)), key=lambda number: len(tried[number]))
    return Packs.concatenate([tried[best], *(_pack_part(sizes, budgets, part, keys[best]) for part in others)])


def _pack_part(sizes: Ints, budgets: Ints, part: Ints, key: Floats) -> Packs:
    """Pack the samples of a part, those of the highest `key` [N] first."""
    own = sizes[part]
    about = int(np.ceil((own / np.maximum(budgets, 1)).sum(axis=0).max())) + 1
    owners, packs = _place(own, budgets, np.argsort(-key[part], kind="stable"), about)
    return Packs(offsets_of(np.bincount(owners, minlength=packs)), part[np.argsort(owners, kind="stable")])


@numba.njit(cache=True)
def _place(sizes: Ints, budgets: Ints, order: Ints, about: int) -> tuple[Ints, int]:
    """Return the pack of each sample, and how many packs there are. `about` so many are expected."""
    dimensions = len(budgets)
    leaves = 1
    while leaves < about + about // 4:
        leaves *= 2
    room = np.full((2 * leaves, dimensions), -1, np.int64)  # node n has children 2n and 2n + 1, leaves come last
    owners = np.empty(len(order), np.int64)
    packs = 0
    for sample in order:
        leaf = _first_fit(room, sizes[sample], leaves)
        if leaf < 0:
            if packs == leaves:
                room = _doubled(room)
                leaves *= 2
            leaf = leaves + packs
            packs += 1
            room[leaf] = budgets
        owners[sample] = leaf - leaves
        room[leaf] -= sizes[sample]
        node = leaf // 2
        while node > 0:
            changed = False
            for size in range(dimensions):
                most = max(room[2 * node, size], room[2 * node + 1, size])
                changed |= most != room[node, size]
                room[node, size] = most
            if not changed:
                break
            node //= 2
    return owners, packs


@numba.njit(cache=True)
def _first_fit(room: Ints, wanted: Ints, leaves: int) -> int:
    """Return the first leaf with room for a sample, or -1; nodes are visited from left to right."""
    node = 1
    while True:
        fits = True
        for size in range(len(wanted)):
            fits &= room[node, size] >= wanted[size]
        if fits and node >= leaves:
            return node
        if fits:
            node *= 2
            continue
        while node & 1:  # a right child: its parent is done
            node >>= 1
        if node == 0:
            return -1
        node += 1


@numba.njit(cache=True)
def _doubled(room: Ints) -> Ints:
    """Return a tree of twice as many leaves, the old one its left half."""
    larger = np.full((2 * len(room), room.shape[1]), -1, np.int64)
    level = 1
    while level < len(room):
        for node in range(level, 2 * level):
            for size in range(room.shape[1]):
                larger[node + level, size] = room[node, size]
        level *= 2
    for size in range(room.shape[1]):
        larger[1, size] = room[1, size]
    return larger
