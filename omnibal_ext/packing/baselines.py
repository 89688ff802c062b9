"""What balanced packing is compared with: fixed numbers of samples a microbatch, padded to the longest one."""

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.packs import Packs, offsets_of
from omnibal_ext.sizes import Sizes


def pack_random(sizes: Sizes, samples_per_pack: int, seed: int) -> Packs:
    """Shuffle the samples and cut them into microbatches of `samples_per_pack` (the last one may be smaller)."""
    return _cut(np.random.default_rng(seed).permutation(len(sizes)), samples_per_pack)


def _cut(order: NDArray[np.int64], samples_per_pack: int) -> Packs:
    counts = np.full(-(-len(order) // samples_per_pack), samples_per_pack, np.int64)
    if len(counts):
        counts[-1] = len(order) - samples_per_pack * (len(counts) - 1)
    return Packs(offsets_of(counts), order.astype(np.int64))
