"""First-fit-decreasing in several sizes: each sample, largest first, goes into the first pack with room.

A tree over the packs holds, for each size, the most room in any pack below, so that the first fit is found without
looking at all packs (Johnson, 1974). Work and memory grow with the number of samples, not of distinct sizes.
"""

import numba
import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.packing.packs import PackList, offsets_of

CHUNK = 100_000  # samples packed together; a search for a first fit slows down with the number of packs
OTHERS = 0.25  # weight of the other fractions: 100,000 samples of native resolution take 1.0015 of the bound, .02 to .5
# give 1.0014 to 1.0022, 0 1.0032, 1 1.0075, their largest fraction 1.0154


def pack_first_fit(sizes: Ints, budgets: Ints, seed: int = 0) -> PackList:
    """Pack all samples; each must fit the budgets alone.

    1. Divide the samples at random into chunks of at most `CHUNK`; this costs at most a pack per chunk.
    2. Sort a chunk, largest first, by several keys: the largest fraction of a budget, the sum of fractions, that of
       their squares, and each fraction with a share of the others.
    3. Put each sample into the first pack with room in every size, else into a new pack.
    4. Use the key that needs the fewest packs for the first chunk for all others too.

    Args:
        sizes: of each sample, [N, K].
        budgets: of a pack, [K]; a budget of 0 is for a size that no sample has.
    """
    if len(sizes) == 0:
        return PackList.concatenate([])
    chunks = np.array_split(np.random.default_rng(seed).permutation(len(sizes)), -(-len(sizes) // CHUNK))
    first, *others = [np.sort(chunk) for chunk in chunks]
    keys = range(3 + sizes.shape[1] if sizes.shape[1] > 1 else 1)
    tried = [_pack_chunk(sizes, budgets, first, key) for key in keys]
    best = min(keys, key=lambda key: len(tried[key]))
    return PackList.concatenate([tried[best], *(_pack_chunk(sizes, budgets, chunk, best) for chunk in others)])


def _pack_chunk(sizes: Ints, budgets: Ints, chunk: Ints, key: int) -> PackList:
    """Pack a chunk first-fit, largest first by sort key number `key`; return its packs."""
    chunk_sizes = sizes[chunk]
    fractions = chunk_sizes / np.maximum(budgets, 1)
    about, sums = int(np.ceil(fractions.sum(axis=0).max())) + 1, fractions.sum(axis=1)
    alone = [OTHERS * sums + (1 - OTHERS) * fraction for fraction in fractions.T]
    values = [fractions.max(axis=1), sums, (fractions**2).sum(axis=1), *alone][key]
    owners, packs = _place(chunk_sizes, budgets, np.argsort(-values, kind="stable"), about)
    return PackList(offsets_of(np.bincount(owners, minlength=packs)), chunk[np.argsort(owners, kind="stable")])


@numba.njit(cache=True)
def _place(sizes: Ints, budgets: Ints, order: Ints, about: int) -> tuple[Ints, int]:
    """Put samples, in `order`, into the first pack with room; return each one's pack [N] and how many packs."""
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
    """Return the first leaf of the tree `room`, a pack, that has room for `wanted` [K], or -1."""
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
    """Return a tree with twice the leaves, whose left half is the old one."""
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
