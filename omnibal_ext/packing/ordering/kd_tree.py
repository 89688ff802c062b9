"""Packs alike: a k-d tree over their costs, whose leaves are whole rows."""

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints


@numba.njit(cache=True)
def halve(columns: Floats, order: Ints, row_size: int, tolerance: float) -> Ints:
    """Rearrange `order` in place so that neighbours are alike: halve at the column that spreads most, again and again.

    Args:
        columns: costs of each pack, [K, P].
        order: whole rows of `row_size` packs.
        tolerance: packs whose costs have no greater mean distance from their mean (the columns' sum) stay together.

    Returns:
        Where each leaf starts, in rows, ascending; and the number of rows last.
    """
    rows = len(order) // row_size
    starts = np.zeros(rows + 1, np.bool_)
    starts[0], starts[rows] = True, True
    waiting = [(0, rows)]
    while len(waiting) > 0:
        first, count = waiting.pop()
        if count < 2:
            continue
        places = order[first * row_size : (first + count) * row_size]
        widest, most, total = 0, 0.0, 0.0
        for column in range(len(columns)):
            spread = _spread(columns[column], places)
            total += spread
            if spread > most:
                widest, most = column, spread
        if total <= tolerance or most == 0.0:
            continue
        middle = count // 2
        _select(columns[widest], places, middle * row_size)
        starts[first + middle] = True
        waiting.append((first, middle))
        waiting.append((first + middle, count - middle))
    return np.flatnonzero(starts)


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
