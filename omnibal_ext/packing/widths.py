"""How many ranks run a sample: the fewest whose budgets, taken together, hold it."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.errors import UserError
from omnibal_ext.sizes import Sizes

NODE_RANKS = 8
"""Data-parallel ranks of a node where nobody says; a team that leaves it is made only where `--widths` says so."""


class Budgets(Protocol):
    """What one rank holds; `omnibal_ext.packing.options.PackOptions` is one."""

    @property
    def vit_budget(self) -> int:
        """Most tiles."""

    @property
    def llm_budget(self) -> int:
        """Most tokens."""

    @property
    def budgets(self) -> Mapping[str, int]:
        """Most of each further size; 0: not limited."""


def read_widths(text: str) -> tuple[int, ...] | None:
    """Read `1,2,4`, or "auto" (None). Raises ValueError."""
    return None if text == "auto" else tuple(int(width) for width in text.split(","))


def check_widths(widths: Sequence[int], data_parallel_size: int) -> None:
    """Raise UserError unless widths ascend, each divides the next, and all divide the data-parallel size.

    Then teams of `width` neighbouring ranks lie inside wider ones, and every list of packs has a place for each.
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
    """Return the least of `widths` that holds each sample, [N]; 0 where none does."""
    needed = ranks_needed(sizes, budgets)
    place = np.searchsorted(widths, needed)
    return np.append(widths, 0)[place]


def ranks_needed(sizes: Sizes, budgets: Budgets) -> Ints:
    """Return how many ranks' budgets each sample takes, 1 or more: [N]."""
    needed = np.maximum(1, -(-sizes.tokens // budgets.llm_budget))
    limits = [(sizes.tiles.astype(np.int64), budgets.vit_budget)]
    limits += [(sizes.more[name], budget) for name, budget in budgets.budgets.items() if budget]
    for values, budget in limits:
        many = -(-values // budget) if budget else np.where(values > 0, np.iinfo(np.int64).max, 0)
        needed = np.maximum(needed, many)
    return needed


def widths_for(
    sizes: Sizes, budgets: Budgets, data_parallel_size: int, node_ranks: int = NODE_RANKS
) -> tuple[int, ...]:
    """Return the powers of two that samples need, each of which divides the data-parallel size; 1 is always there.

    Each divides the data-parallel ranks of a node too, so that no team leaves it. A corpus without long samples has the
    width 1 alone.
    """
    possible = [1]
    while data_parallel_size % (2 * possible[-1]) == node_ranks % (2 * possible[-1]) == 0:
        possible.append(2 * possible[-1])
    used = set(sample_widths(sizes, budgets, possible).tolist())
    return tuple(width for width in possible if width == 1 or width in used)
