"""Hierarchical Balance Packing as printed (HBP, arXiv 2503.07680), a baseline: levels, greedy fill, sort by attention.

Levels are widths of packs: lengths and sequence-parallel sizes of level i are `width_i` times a rank's budgets and
`width_i` ranks. Of the paper's search for them (algorithms 1, 3 and 4) nothing is left to packing: with one budget a
rank, the level that is fastest for a token is the narrowest, and the largest is that which holds the longest sample.
`naive_epoch` is what HBP compares itself with: packs of one width, in random order.
"""

import bisect
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Ints
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.balance_ranks import assign_zigzag
from omnibal_ext.packing.ordering.metrics import dist_ratios, rank_loads
from omnibal_ext.packing.pack_epoch import Epoch
from omnibal_ext.packing.packers.isf import pack_isf
from omnibal_ext.packing.packs import ATTENTION, LoadedPacks, PackList, pack_loads
from omnibal_ext.packing.widths import sample_widths
from omnibal_ext.sizes import Sizes


def hierarchical_epoch(
    corpus: Corpus, reasons: NDArray[np.int8], options: PackOptions, costs: PackCosts, epoch: int
) -> Epoch:
    """Pack samples that may all share packs into an epoch and assign slots; replaces `pack_epoch`, without costs."""
    seed, samples = options.seed + epoch, np.flatnonzero(reasons == 0)
    sizes = corpus.sizes.take(samples)
    of_samples = sample_widths(sizes, options, options.widths)
    budgets = options.vit_budget, options.llm_budget
    packs, widths = pack_hierarchical(sizes, *budgets, options.widths, of_samples, seed=seed)
    packs = PackList(packs.pack_offsets, samples[packs.sample_ids])
    loads = pack_loads(packs, corpus.sizes)
    slots = hierarchical_iterations(loads, widths, options.data_parallel_size, options.micro_batches, seed)
    return Epoch([LoadedPacks(packs, loads)], [len(slots)], widths, slots)


def naive_epoch(corpus: Corpus, reasons: NDArray[np.int8], options: PackOptions, costs: PackCosts, epoch: int) -> Epoch:
    """Pack by ISF into packs of the widest width, in random order; replaces `pack_epoch`, without costs."""
    seed, samples, width = options.seed + epoch, np.flatnonzero(reasons == 0), options.widths[-1]
    packs = pack_isf(corpus.sizes.take(samples), width * options.vit_budget, width * options.llm_budget, seed=seed)
    packs = PackList(packs.pack_offsets, samples[packs.sample_ids])
    teams = options.data_parallel_size // width
    batch = teams * options.micro_batches
    order = np.append(np.random.default_rng((seed, 1)).permutation(len(packs)), np.full(-len(packs) % batch, -1))
    slots = np.repeat(assign_zigzag(order.reshape(-1, batch), teams), width, axis=1)
    loaded = LoadedPacks(packs, pack_loads(packs, corpus.sizes))
    return Epoch([loaded], [len(slots)], np.full(len(packs), width), slots)


def pack_hierarchical(
    sizes: Sizes, vit_budget: int, llm_budget: int, widths: Sequence[int], of_samples: Ints, *, seed: int
) -> tuple[PackList, Ints]:
    """Pack all samples level by level; return the packs and the width of each, [P].

    1. A sample belongs to the lowest level that holds it, `of_samples` [N] (algorithm 5).
    2. From the highest level down: the samples of a level are packed; then each pack takes of the levels below, the
       next one first and in it the longest first, whatever fits (algorithm 6).
    """
    left = {width: np.flatnonzero(of_samples == width) for width in widths}
    done: list[PackList] = []
    of_packs: list[Ints] = []
    for level in reversed(range(len(widths))):
        width = widths[level]
        own = left[width]
        found = _pack(sizes.take(own), width * vit_budget, width * llm_budget, few=level > 0, seed=seed)
        packs = [own[found.sample_ids[a:b]].tolist() for a, b in pairwise(found.pack_offsets)]
        for below in reversed(widths[:level]):
            left[below] = _fill(packs, left[below], sizes, width * vit_budget, width * llm_budget)
        done.append(PackList.from_lists(packs))
        of_packs.append(np.full(len(packs), width, np.int64))
    return PackList.concatenate(done), np.concatenate(of_packs)


def _pack(sizes: Sizes, vit_budget: int, llm_budget: int, few: bool, seed: int) -> PackList:
    """Pack a level by ISF; best fit in random order where samples are few and large, as ISF leaves much room then."""
    if not few:
        return pack_isf(sizes, vit_budget, llm_budget, seed=seed)
    packs: list[list[int]] = []
    tiles_left: list[int] = []
    room: list[tuple[int, int]] = []  # tokens left in each pack, ascending
    for sample in np.random.default_rng(seed).permutation(len(sizes)).tolist():
        tokens, tiles = int(sizes.tokens[sample]), int(sizes.tiles[sample])
        place = bisect.bisect_left(room, (tokens, -1))
        while place < len(room) and tiles_left[room[place][1]] < tiles:
            place += 1
        left, pack = room.pop(place) if place < len(room) else (llm_budget, len(packs))
        if pack == len(packs):
            packs.append([])
            tiles_left.append(vit_budget)
        packs[pack].append(sample)
        tiles_left[pack] -= tiles
        bisect.insort(room, (left - tokens, pack))
    return PackList.from_lists(packs)


def _fill(packs: list[list[int]], pool: Ints, sizes: Sizes, vit_budget: int, llm_budget: int) -> Ints:
    """Add to each pack the longest samples of the pool that fit; return what is left of it."""
    samples = pool[np.argsort(sizes.tokens[pool], kind="stable")].tolist()
    lengths = sizes.tokens[samples].tolist()
    for pack in packs:
        tokens = llm_budget - int(sizes.tokens[pack].sum())
        tiles = vit_budget - int(sizes.tiles[pack].sum())
        place = bisect.bisect_right(lengths, tokens) - 1
        while place >= 0:
            if sizes.tiles[samples[place]] <= tiles:
                sample = samples.pop(place)
                tokens -= lengths.pop(place)
                tiles -= int(sizes.tiles[sample])
                pack.append(sample)
                place = bisect.bisect_right(lengths, tokens, hi=place)
            place -= 1
    return np.array(samples, np.int64)


def hierarchical_iterations(loads: Ints, widths: Ints, data_parallel_size: int, micro_batches: int, seed: int) -> Ints:
    """Put packs of one level, in the order of their sum(length^2), into iterations (algorithm 7): [I, D, M].

    An iteration is of one level, and the last of each may be incomplete. Levels alternate as a shuffle has it.

    Args:
        loads: of whole packs, [P, K].
        widths: [P].
    """
    tables = []
    for width in np.unique(widths).tolist():
        own = np.flatnonzero(widths == width)
        own = own[np.argsort(loads[own, ATTENTION], kind="stable")]
        teams = data_parallel_size // width
        slots = np.append(own, np.full(-len(own) % (teams * micro_batches), -1))
        rounds = slots.reshape(-1, micro_batches, teams).transpose(0, 2, 1)
        tables.append(np.repeat(rounds, width, axis=1))
    return np.random.default_rng((seed, 1)).permutation(np.concatenate(tables))


def balance_ratio(iterations: Ints, loads: Ints, widths: Ints) -> float:
    """Return `dist_ratio` as HBP defines it (arXiv 2503.07680): DBR of packs' tokens, ABR of their sum(len^2).

    HBP has no empty slots and divides a pack evenly over its ranks. So iterations with empty slots are left out (unless
    all have some), and each rank of a pack counts as 1 / width of it.

    Args:
        iterations: pack number of each slot, [I, D, M].
        loads: of complete packs, [P].
        widths: ranks that run each pack, [P].
    """
    full = (iterations >= 0).all(axis=(1, 2))
    counted = iterations[full] if full.any() else iterations
    return float(dist_ratios(rank_loads(counted, loads / widths)).mean())
