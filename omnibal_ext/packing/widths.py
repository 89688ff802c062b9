"""How many ranks run a sample: the fewest whose budgets together hold it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.errors import UserError
from omnibal_ext.sizes import Sizes

NODE_RANKS = 8
"""Default data-parallel ranks of a node. Teams span nodes only if `--widths` gives numbers."""


class Budgets(Protocol):
    """The budgets of one rank; `omnibal_ext.packing.options.PackOptions` has them."""

    @property
    def vit_budget(self) -> int:
        """Most tiles of a pack on one rank."""

    @property
    def llm_budget(self) -> int:
        """Most tokens of a pack on one rank."""

    @property
    def budgets(self) -> Mapping[str, int]:
        """Most of each further size; 0: not limited."""


def read_widths(text: str) -> tuple[int, ...] | None:
    """Read --widths: `1,2,4` as (1, 2, 4), "auto" as None. Raises ValueError."""
    return None if text == "auto" else tuple(int(width) for width in text.split(","))


def check_widths(widths: Sequence[int], data_parallel_size: int) -> None:
    """Raise UserError unless widths ascend, each divides the next, and all divide the data-parallel size.

    So each team of neighbouring ranks lies within one team of any larger width.
    """
    shown = f"--widths {','.join(map(str, widths))}"
    if not widths or widths[0] < 1:
        raise UserError(f"{shown}: widths are 1 rank or more")
    for narrow, wide in pairwise(widths):
        if wide <= narrow or wide % narrow:
            raise UserError(f"{shown}: {wide} must be a multiple of {narrow}, so that teams lie inside each other")
    if data_parallel_size % widths[-1]:
        raise UserError(
            f"{shown}: {widths[-1]} ranks must divide --data-parallel-size {data_parallel_size}; leave that width out, "
            "or use other ranks"
        )


def sample_widths(sizes: Sizes, budgets: Budgets, widths: Sequence[int]) -> Ints:
    """Return the smallest of `widths`, numbers of ranks, whose budgets together hold each sample, [N]; 0: none."""
    needed = ranks_needed(sizes, budgets)
    position = np.searchsorted(widths, needed)
    return np.append(widths, 0)[position]


def ranks_needed(sizes: Sizes, budgets: Budgets) -> Ints:
    """Return how many ranks' budgets it takes together to hold each sample, 1 or more, [N]."""
    columns, limits = limited_sizes(sizes, budgets)
    needed = np.ones(len(sizes), np.int64)
    for values, budget in zip(columns.T, limits.tolist(), strict=True):
        many = -(-values // budget) if budget else np.where(values > 0, np.iinfo(np.int64).max, 0)
        needed = np.maximum(needed, many)
    return needed


def limited_sizes(sizes: Sizes, budgets: Budgets) -> tuple[Ints, Ints]:
    """Return the sizes of samples that have a budget, [N, K], tiles and tokens first, and one rank's budgets, [K]."""
    limits = {name: budget for name, budget in budgets.budgets.items() if budget}
    columns = [sizes.tiles.astype(np.int64), sizes.tokens, *(sizes.more[name] for name in limits)]
    return np.column_stack(columns), np.array([budgets.vit_budget, budgets.llm_budget, *limits.values()])


def widths_for(
    sizes: Sizes, budgets: Budgets, data_parallel_size: int, node_ranks: int = NODE_RANKS
) -> tuple[int, ...]:
    """Return the powers of two that samples need, 1 included, as far as they divide the data-parallel size.

    They also divide the data-parallel ranks of a node, so that no team spans nodes.
    """
    possible = [1]
    while data_parallel_size % (2 * possible[-1]) == node_ranks % (2 * possible[-1]) == 0:
        possible.append(2 * possible[-1])
    used = set(sample_widths(sizes, budgets, possible).tolist())
    return tuple(width for width in possible if width == 1 or width in used)
