"""The paper's packer: Iterative Sampling and Filtering (OmniBal, arXiv 2407.20761, section 3.2)."""

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.packs import PackList, offsets_of
from omnibal_ext.sizes import Sizes

FILTER_TOKENS = 128  # the paper's Q't = Qt - 128


def pack_isf(
    sizes: Sizes, vit_budget: int, llm_budget: int, *, seed: int, passes: int = 10, filter_tokens: int = FILTER_TOKENS
) -> PackList:
    """Pack all samples of `sizes`; every sample must fit the budgets alone.

    1. Shuffle the pool.
    2. Sampling: append samples to a group until the next one would exceed a budget; it starts the next group.
    3. Filtering: keep groups with tiles >= vit_budget or tokens >= llm_budget - filter_tokens.
    4. The other groups' samples are the new pool. Repeat from 1, `passes` times or until the pool is empty.
    5. Group the remaining samples once more and keep all groups.
    """
    generator = np.random.default_rng(seed)
    pool = np.arange(len(sizes), dtype=np.int64)
    kept: list[PackList] = []
    for last in [False] * passes + [True]:
        if len(pool) == 0:
            break
        pool = generator.permutation(pool)
        tiles, tokens = sizes.tiles[pool], sizes.tokens[pool]
        starts = _group_starts(tiles, tokens, vit_budget, llm_budget)
        full = np.add.reduceat(tiles, starts) >= vit_budget
        full |= np.add.reduceat(tokens, starts) >= llm_budget - filter_tokens
        full |= last
        counts = np.diff(starts, append=len(pool))
        in_full_group = np.repeat(full, counts)
        kept.append(PackList(offsets_of(counts[full]), pool[in_full_group]))
        pool = pool[~in_full_group]
    return PackList.concatenate(kept)


@numba.njit(cache=True)
def _group_starts(
    tiles: NDArray[np.int32], tokens: NDArray[np.int64], vit_budget: int, llm_budget: int
) -> NDArray[np.int64]:
    """Divide a sequence of samples into groups within budget; return the start of each group."""
    starts = np.empty(len(tokens), np.int64)
    groups = 0
    group_tiles = group_tokens = 0
    for position in range(len(tokens)):
        group_tiles += tiles[position]
        group_tokens += tokens[position]
        if position == 0 or group_tiles > vit_budget or group_tokens > llm_budget:
            starts[groups] = position
            groups += 1
            group_tiles, group_tokens = tiles[position], tokens[position]
    return starts[:groups]
