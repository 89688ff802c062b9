"""Which packs run together: groups of one global batch, level in tiles, tokens and attention cost at once."""

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.packs import TILES, TOKENS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ATTENTION_WEIGHTS = (0.5, 1.0, 2.0)  # against 1 of tiles and of tokens; all are tried
MOST_PACKS_TO_TRY = 200_000  # a larger corpus is level at the first weight


def level_groups(loads: Ints, group_size: int, seed: int) -> Ints:
    """Order packs so that each `group_size` of them are alike; groups are in random order.

    1. Set the emptiest packs aside, so many that the others fill whole groups; they come last.
    2. Halve the others at the load that spreads most (weighted), again and again, down to single groups.
    3. Do 2 for each weight of attention, keep the order whose worst imbalance inside groups is least.
    4. Sort each group from heavy to light, and shuffle the groups.

    Args:
        loads: tiles, tokens and attention cost of each pack, [P, 3].

    Returns:
        Pack numbers [P].
    """
    groups = len(loads) // group_size
    relative = loads / np.maximum(loads.mean(axis=0), 1e-9)
    emptiest = np.argsort(relative[:, TILES] + relative[:, TOKENS], kind="stable")
    aside, others = emptiest[: len(loads) - groups * group_size], emptiest[len(loads) - groups * group_size :]
    if groups == 0:
        return aside
    columns = np.ascontiguousarray(relative.T)
    best, least = others, np.inf
    for weight in ATTENTION_WEIGHTS[: 1 if len(loads) > MOST_PACKS_TO_TRY else None]:
        order = np.random.default_rng(seed).permutation(others)
        _halve(columns * np.array([[1.0], [1.0], [weight]]), order, group_size)
        grouped = relative[order].reshape(groups, group_size, 3)
        spread = (1.0 - grouped.mean(axis=1) / np.maximum(grouped.max(axis=1), 1e-9)).mean(axis=0)
        if spread.max() < least:
            best, least = order, float(spread.max())
    shuffled = np.random.default_rng((seed, 1)).permutation(best.reshape(groups, group_size)).ravel()
    _sort_groups(columns, shuffled, group_size)
    return np.concatenate([shuffled, aside])


@numba.njit(cache=True)
def _halve(columns: Floats, order: Ints, group_size: int) -> None:
    """Rearrange `order` in place: a k-d tree over the columns [3, P] whose leaves are groups."""
    waiting = [(0, len(order) // group_size)]
    while len(waiting) > 0:
        first, groups = waiting.pop()
        if groups < 2:
            continue
        end = first + groups * group_size
        widest, most = 0, 0.0
        for column in range(len(columns)):
            spread = _spread(columns[column], order[first:end])
            if spread > most:
                widest, most = column, spread
        if most == 0.0:
            continue
        middle = groups // 2 * group_size
        _select(columns[widest], order[first:end], middle)
        waiting.append((first, groups // 2))
        waiting.append((first + middle, groups - groups // 2))


@numba.njit(cache=True)
def _spread(values: Floats, places: Ints) -> float:
    """Return the mean distance from the mean."""
    mean = 0.0
    for place in places:
        mean += values[place]
    mean /= len(places)
    spread = 0.0
    for place in places:
        spread += abs(values[place] - mean)
    return spread / len(places)


@numba.njit(cache=True)
def _select(values: Floats, places: Ints, rank: int) -> None:
    """Move the `rank` places of the smallest values to the front (quickselect, pivot by median of three)."""
    low, high = 0, len(places) - 1
    while low < high:
        a, b, c = values[places[low]], values[places[(low + high) // 2]], values[places[high]]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while values[places[i]] < pivot:
                i += 1
            while values[places[j]] > pivot:
                j -= 1
            if i <= j:
                places[i], places[j] = places[j], places[i]
                i, j = i + 1, j - 1
        if rank <= j:
            high = j
        elif rank >= i:
            low = i
        else:
            return


@numba.njit(cache=True)
def _sort_groups(columns: Floats, order: Ints, group_size: int) -> None:
    """Sort each group by the load that spreads most in it, heavy first, so that dealing to and fro evens out sums."""
    for first in range(0, len(order), group_size):
        group = order[first : first + group_size]
        widest, most = 0, -1.0
        for column in range(len(columns)):
            spread = _spread(columns[column], group)
            if spread > most:
                widest, most = column, spread
        for i in range(1, len(group)):  # insertion: groups are short
            pack = group[i]
            j = i
            while j > 0 and columns[widest, group[j - 1]] < columns[widest, pack]:
                group[j] = group[j - 1]
                j -= 1
            group[j] = pack
