"""The paper's packer: Iterative Sampling and Filtering (OmniBal, arXiv 2407.20761, section 3.2)."""

from collections.abc import Mapping

import numba
import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.packing.packers.balanced import NO_BUDGETS
from omnibal_ext.packing.packs import PackList, offsets_of
from omnibal_ext.sizes import Sizes

FILTER_TOKENS = 128  # the paper's Q't = Qt - 128


def pack_isf(
    sizes: Sizes,
    vit_budget: int,
    llm_budget: int,
    budgets: Mapping[str, int] = NO_BUDGETS,
    *,
    seed: int,
    passes: int = 10,
    filter_tokens: int = FILTER_TOKENS,
) -> PackList:
    """Pack all samples of `sizes`; every sample must fit the budgets alone. `budgets` are those of further sizes, which
    the paper does not have; 0: no limit.

    1. Shuffle the pool.
    2. Sampling: append samples to a group until the next one would exceed a budget; it starts the next group.
    3. Filtering: keep groups with tiles >= vit_budget or tokens >= llm_budget - filter_tokens, or with as large a share
       of a further budget as these tokens are of theirs.
    4. The other groups' samples are the new pool. Repeat from 1, `passes` times or until the pool is empty.
    5. Group the remaining samples once more and keep all groups.
    """
    further = {name: budget for name, budget in budgets.items() if budget}
    columns = [sizes.tiles.astype(np.int64), sizes.tokens, *(sizes.more[name] for name in further)]
    limits = np.array([vit_budget, llm_budget, *further.values()])
    enough = limits - np.array([0, filter_tokens, *(each * filter_tokens // llm_budget for each in further.values())])
    generator = np.random.default_rng(seed)
    pool = np.arange(len(sizes), dtype=np.int64)
    kept: list[PackList] = []
    for last in [False] * passes + [True]:
        if len(pool) == 0:
            break
        pool = generator.permutation(pool)
        loads = np.column_stack([column[pool] for column in columns])
        starts = _group_starts(loads, limits)
        full = (np.add.reduceat(loads, starts) >= enough).any(axis=1)
        full |= last
        counts = np.diff(starts, append=len(pool))
        in_full_group = np.repeat(full, counts)
        kept.append(PackList(offsets_of(counts[full]), pool[in_full_group]))
        pool = pool[~in_full_group]
    return PackList.concatenate(kept)


@numba.njit(cache=True)
def _group_starts(loads: Ints, limits: Ints) -> Ints:
    """Divide a sequence of samples [N, sizes] into groups within the limits [sizes]; return their first positions."""
    starts = np.empty(len(loads), np.int64)
    groups, group = 0, np.zeros(len(limits), np.int64)
    for position in range(len(loads)):
        fits = position > 0
        for size in range(len(limits)):
            group[size] += loads[position, size]
            fits = fits and group[size] <= limits[size]
        if not fits:
            starts[groups] = position
            groups += 1
            group[:] = loads[position]
    return starts[:groups]
