"""Quality of a packing: padding, balance across ranks, packs above the lower bound (OmniBal, section 3.1)."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.modalities.modality import LANGUAGE, VISION, Budgets, Size
from omnibal_ext.packing.packs import PackList
from omnibal_ext.sizes import Sizes

Number = TypeVar("Number", np.int64, np.float64)


def lower_bound_packs(sizes: Sizes, budgets: Budgets) -> int:
    """Return ceil(max(all units of a size / its budget)): no packing has fewer packs."""
    all_of: dict[Size, NDArray[Any]] = {VISION.size: sizes.tiles, LANGUAGE.size: sizes.tokens, **sizes.more}
    return max(-(-int(all_of[size].sum(dtype=np.int64)) // budget) for size, budget in budgets.items() if budget)


def pad_ratio(packs: PackList, sizes: Sizes, pad: bool) -> float:
    """Return the mean over packs of sum_i (t_max - t_i) / (t_max * B), in tokens; 0 where packs are not padded."""
    if not pad or len(packs) == 0:
        return 0.0
    starts, tokens = packs.pack_offsets[:-1], sizes.tokens[packs.sample_ids]
    filled = np.add.reduceat(tokens, starts) / (np.maximum.reduceat(tokens, starts) * packs.counts)
    return float(np.mean(1.0 - filled))


def rank_loads(iterations: NDArray[np.int64], loads: NDArray[Number]) -> NDArray[Number]:
    """Sum the microbatches of each data-parallel rank: pack numbers [I, D, M] and loads [P, ...] to [I, D, ...].

    Pack -1 is empty and costs nothing.
    """
    runs = (iterations >= 0).reshape(iterations.shape + (1,) * (loads.ndim - 1))
    total: NDArray[Number] = np.where(runs, loads[iterations], 0).sum(axis=2)
    return total


def dist_ratio(loads: NDArray[Number]) -> float:
    """Return the mean over iterations of sum_i (T_max - T_i) / (T_max * N) for loads [I, N] of N ranks.

    0 for an iteration without work. (The paper's Figure 2 omits the N; its script has it.)
    """
    if loads.size == 0:
        return 0.0
    most = loads.max(axis=1)
    return float(np.where(most > 0, 1.0 - loads.mean(axis=1) / np.where(most > 0, most, 1), 0.0).mean())


def wait(seconds: NDArray[np.float64]) -> float:
    """Return the fraction of device time spent waiting, seconds [I, D, parts]; each part waits for its fullest rank."""
    busy = float(seconds.max(axis=1).sum())
    return 1.0 - float(seconds.mean(axis=1).sum()) / busy if busy > 0 else 0.0
