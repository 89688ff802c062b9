"""Quality of a packing: padding, balance across ranks, packs above the lower bound (OmniBal, section 3.1)."""

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.modalities.modality import Budgets, Size
from omnibal_ext.packing.packs import PackList
from omnibal_ext.sizes import Sizes

Number = TypeVar("Number", np.int64, np.float64)


def lower_bound_packs(sizes: Sizes, budgets: Budgets) -> int:
    """Return ceil(max(all units of a size / its budget)): no packing has fewer packs."""
    return fewest_packs({size: sizes.total(size) for size, budget in budgets.items() if budget}, budgets)


def fewest_packs(units: Mapping[Size, int], budgets: Budgets) -> int:
    """Return the fewest packs that can hold `units`, the sum of all samples in each size, within the budgets."""
    return max(-(-units[size] // budget) for size, budget in budgets.items() if budget)


def pad_ratio(packs: PackList, sizes: Sizes, pad: bool) -> float:
    """Return the mean over packs of sum_i (t_max - t_i) / (t_max * B), of tokens t of B samples; 0 if none is
    padded."""
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


def dist_ratios(loads: NDArray[Number]) -> NDArray[np.float64]:
    """Return sum_i (T_max - T_i) / (T_max * N) of each iteration, [I, ...], for loads T [I, N, ...] of N ranks.

    0 for an iteration without work. (The paper's Figure 2 omits the N; its script has it.)
    """
    most = loads.max(axis=1)
    return np.where(most > 0, 1.0 - loads.mean(axis=1) / np.where(most > 0, most, 1), 0.0)


def wait(seconds: NDArray[np.float64]) -> float:
    """Return the fraction of time that ranks wait for the fullest of each part, by their seconds [I, D, parts]."""
    return wait_of(seconds.max(axis=1), seconds.mean(axis=1))


def wait_of(fullest: NDArray[np.float64], mean: NDArray[np.float64]) -> float:
    """Return the fraction of time that ranks wait, by the seconds [I, parts] of the fullest and of the mean rank."""
    busy = float(fullest.sum())
    return 1.0 - float(mean.sum()) / busy if busy > 0 else 0.0
