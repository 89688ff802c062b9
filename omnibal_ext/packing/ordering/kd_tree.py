"""Sort packs by similar cost: a k-d tree whose leaves are complete rows."""

import numba
import numpy as np

from omnibal_ext.arrays import Floats, Ints


@numba.njit(cache=True)
def halve(columns: Floats, order: Ints, row_size: int, tolerance: float) -> Ints:
    """Sort `order` in place so that neighbours have similar costs: halve repeatedly by the column of widest spread.

    Args:
        columns: costs of each pack, [K, P].
        order: pack numbers, complete rows of `row_size`.
        tolerance: do not halve a leaf whose mean absolute deviation, summed over columns, is at most this.

    Returns:
        First row of each leaf, ascending, then the number of rows.
    """
    rows = len(order) // row_size
    starts = np.zeros(rows + 1, np.bool_)
    starts[0], starts[rows] = True, True
    stack = [(0, rows)]
    while len(stack) > 0:
        first, count = stack.pop()
        if count < 2:
            continue
        items = order[first * row_size : (first + count) * row_size]
        widest, most, total = 0, 0.0, 0.0
        for column in range(len(columns)):
            spread = _spread(columns[column], items)
            total += spread
            if spread > most:
                widest, most = column, spread
        if total <= tolerance or most == 0.0:
            continue
        middle = count // 2
        _select(columns[widest], items, middle * row_size)
        starts[first + middle] = True
        stack.append((first, middle))
        stack.append((first + middle, count - middle))
    return np.flatnonzero(starts)


@numba.njit(cache=True)
def _spread(values: Floats, items: Ints) -> float:
    """Return the mean absolute deviation."""
    mean = 0.0
    for item in items:
        mean += values[item]
    mean /= len(items)
    spread = 0.0
    for item in items:
        spread += abs(values[item] - mean)
    return spread / len(items)


@numba.njit(cache=True)
def _select(values: Floats, items: Ints, rank: int) -> None:
    """Move the `rank` items of smallest value to the front (quickselect, pivot by median of three)."""
    low, high = 0, len(items) - 1
    while low < high:
        a, b, c = values[items[low]], values[items[(low + high) // 2]], values[items[high]]
        pivot = max(min(a, b), min(max(a, b), c))
        i, j = low, high
        while i <= j:
            while values[items[i]] < pivot:
                i += 1
            while values[items[j]] > pivot:
                j -= 1
            if i <= j:
                items[i], items[j] = items[j], items[i]
                i, j = i + 1, j - 1
        if rank <= j:
            high = j
        elif rank >= i:
            low = i
        else:
            return
