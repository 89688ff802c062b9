"""Baselines for comparison: a fixed number of samples per microbatch, padded to the longest one."""

import numba
import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.packing.packs import PackList, offsets_of
from omnibal_ext.sizes import Sizes

WINDOW_PACKS = 50  # packs whose samples are sorted together; Hugging Face's trainer uses the same


def pack_random(sizes: Sizes, samples_per_pack: int, seed: int) -> PackList:
    """Shuffle the samples and cut them into microbatches of `samples_per_pack` (the last one may be smaller)."""
    return _cut(np.random.default_rng(seed).permutation(len(sizes)), samples_per_pack)


def pack_length_group(sizes: Sizes, samples_per_pack: int, seed: int) -> PackList:
    """Group samples of similar length, like the length-grouped samplers of Hugging Face and LLaVA.

    1. Shuffle the samples and cut them into windows of `WINDOW_PACKS` packs.
    2. Sort each window by tokens, longest first; neighbours share a pack, and neighbouring packs an iteration.
    """
    order = np.random.default_rng(seed).permutation(len(sizes))
    window = np.arange(len(order)) // (WINDOW_PACKS * samples_per_pack)
    return _cut(order[np.lexsort((-sizes.tokens[order], window))], samples_per_pack)


def pack_device_group(
    sizes: Sizes, samples_per_pack: int, data_parallel_size: int, micro_batches: int, seed: int
) -> PackList:
    """Give every device about as many tokens in an iteration, without regard to lengths within a pack.

    1. Shuffle the samples and cut them into iterations.
    2. Assign an iteration's samples, longest first, to the device with the fewest tokens that has room.
    3. Cut the samples of a device into its packs in that order. Packs are returned in the order in which
       `assign_zigzag` gives them to the devices.
    """
    order = np.random.default_rng(seed).permutation(len(sizes))
    size = samples_per_pack * data_parallel_size * micro_batches
    complete = len(order) // size * size
    iteration = np.arange(complete) // size
    longest_first = order[:complete][np.lexsort((-sizes.tokens[order[:complete]], iteration))]
    placed = _to_lightest(longest_first, sizes.tokens, data_parallel_size, samples_per_pack * micro_batches)
    packs = placed.reshape(-1, data_parallel_size, micro_batches, samples_per_pack).transpose(0, 2, 1, 3).copy()
    packs[:, 1::2] = packs[:, 1::2, ::-1]
    return _cut(np.concatenate([packs.ravel(), order[complete:]]), samples_per_pack)


@numba.njit(cache=True)
def _to_lightest(samples: Ints, tokens: Ints, devices: int, room: int) -> Ints:
    """Assign each iteration's samples in turn to the device of fewest tokens with room; return them by device."""
    placed = np.empty_like(samples)
    for first in range(0, len(samples), devices * room):
        taken, load = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
        for sample in samples[first : first + devices * room]:
            lightest = -1
            for device in range(devices):
                if taken[device] < room and (lightest < 0 or load[device] < load[lightest]):
                    lightest = device
            placed[first + lightest * room + taken[lightest]] = sample
            taken[lightest] += 1
            load[lightest] += tokens[sample]
    return placed


def _cut(order: Ints, samples_per_pack: int) -> PackList:
    counts = np.full(-(-len(order) // samples_per_pack), samples_per_pack, np.int64)
    if len(counts):
        counts[-1] = len(order) - samples_per_pack * (len(counts) - 1)
    return PackList(offsets_of(counts), order.astype(np.int64))
