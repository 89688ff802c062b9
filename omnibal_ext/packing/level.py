"""Which packs run together: groups of one global batch, level in tiles, tokens and attention cost at once."""

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.packs import TILES, TOKENS

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ATTENTION_WEIGHTS = (0.5, 1.0, 2.0, 0.7, 1.4, 0.35, 2.8, 0.25, 4.0)  # against 1 of tiles and of tokens
MOST_PACKS_TO_REFINE = 50_000  # more packs are level enough at the first weight, and unrefined
PACKS_TO_WEIGH = 80_000  # in all: the fewer packs there are, the more weights are tried
NEIGHBOURS = 6  # groups after its own that a pack may move to


def level_groups(loads: Ints, data_parallel_size: int, micro_batches: int, seed: int) -> Ints:
    """Order packs so that those of one iteration (`dispatch.deal` deals them to the ranks) are level.

    1. Set the emptiest packs aside, so many that the others fill whole groups of D * M; they come last.
    2. Halve the others at the load that spreads most (weighted), again and again, down to single groups.
    3. Sort each group from heavy to light, and swap packs: between neighbouring groups if every rank runs one, between
       the ranks of a group if they run several.
    4. Do 2 and 3 for several weights of attention, keep the order whose worst mean imbalance is least.
    5. Shuffle the groups.

    Args:
        loads: tiles, tokens and attention cost of each pack, [P, 3].

    Returns:
        Pack numbers [P].
    """
    group_size = data_parallel_size * micro_batches
    groups = len(loads) // group_size
    relative = loads * (len(loads) / np.maximum(loads.sum(axis=0), 1))
    emptiest = np.argsort(relative[:, TILES] + relative[:, TOKENS], kind="stable")
    aside, others = emptiest[: len(loads) - groups * group_size], emptiest[len(loads) - groups * group_size :]
    if groups == 0:
        return aside
    columns = np.ascontiguousarray(relative.T)
    refine = len(loads) <= MOST_PACKS_TO_REFINE
    weights = PACKS_TO_WEIGH // len(loads) if refine else 1
    best, least = others, np.inf
    for weight in ATTENTION_WEIGHTS[:weights]:
        order = np.random.default_rng(seed).permutation(others)
        _halve(columns * np.array([[1.0], [1.0], [weight]]), order, group_size)
        _sort_groups(columns, order, group_size)
        if refine and micro_batches == 1:
            _swap_between_groups(columns, order, group_size)
        elif refine:
            _swap_between_ranks(columns, order, data_parallel_size, micro_batches)
        worst = float(_mean_imbalance(columns, order, data_parallel_size, micro_batches).max())
        if worst < least:
            best, least = order, worst
    shuffled = np.random.default_rng((seed, 1)).permutation(best.reshape(groups, group_size)).ravel()
    return np.concatenate([shuffled, aside])


@numba.njit(cache=True)
def _rank_sums(columns: Floats, group: Ints, ranks: int) -> Floats:
    """Add up what each rank runs of a group, dealt to and fro: [3, D]."""
    sums = np.zeros((len(columns), ranks))
    for rank in range(ranks):
        for turn in range(len(group) // ranks):
            for column in range(len(columns)):
                sums[column, rank] += columns[column, group[_place(rank, turn, ranks)]]
    return sums


@numba.njit(cache=True)
def _place(rank: int, turn: int, ranks: int) -> int:
    """Return where in a group the pack stands that a rank runs at its `turn`, see `dispatch.deal`."""
    return turn * ranks + (rank if turn % 2 == 0 else ranks - 1 - rank)


@numba.njit(cache=True)
def _imbalance(sums: Floats, column: int) -> float:
    """Return the DistRatio of one iteration."""
    total, most = 0.0, 0.0
    for value in sums[column]:
        total += value
        most = max(most, value)
    return 1.0 - total / most / sums.shape[1] if most > 0 else 0.0


@numba.njit(cache=True)
def _all_imbalance(sums: Floats) -> float:
    return _imbalance(sums, 0) + _imbalance(sums, 1) + _imbalance(sums, 2)


@numba.njit(cache=True)
def _mean_imbalance(columns: Floats, order: Ints, ranks: int, micro_batches: int) -> Floats:
    """Return the DistRatio of each load, [3]."""
    mean = np.zeros(len(columns))
    size = ranks * micro_batches
    for first in range(0, len(order), size):
        sums = _rank_sums(columns, order[first : first + size], ranks)
        for column in range(len(columns)):
            mean[column] += _imbalance(sums, column) * size / len(order)
    return mean


@numba.njit(cache=True)
def _swap_between_ranks(columns: Floats, order: Ints, ranks: int, micro_batches: int) -> None:
    """Swap a pack of the heaviest rank with one of the lightest, as long as the iteration gets more level."""
    for first in range(0, len(order), ranks * micro_batches):
        group = order[first : first + ranks * micro_batches]
        sums = _rank_sums(columns, group, ranks)
        failed = 0
        for step in range(12 * ranks):
            column = step % len(columns)
            heavy, light = np.argmax(sums[column]), np.argmin(sums[column])
            best, least = (-1, -1), _all_imbalance(sums) - 1e-12
            for turn in range(micro_batches * micro_batches):
                i = _place(heavy, turn // micro_batches, ranks)
                j = _place(light, turn % micro_batches, ranks)
                change = columns[:, group[j]] - columns[:, group[i]]
                sums[:, heavy] += change
                sums[:, light] -= change
                imbalance = _all_imbalance(sums)
                sums[:, heavy] -= change
                sums[:, light] += change
                if imbalance < least:
                    best, least = (i, j), imbalance
            failed += 1
            if best[0] >= 0 and heavy != light:
                group[best[0]], group[best[1]] = group[best[1]], group[best[0]]
                sums = _rank_sums(columns, group, ranks)
                failed = 0
            if failed == len(columns):
                break


@numba.njit(cache=True)
def _swap_between_groups(columns: Floats, order: Ints, group_size: int) -> None:
    """Swap the heaviest pack of a group with one of a neighbouring group, if the two together get more level."""
    groups = len(order) // group_size
    for number in range(groups * NEIGHBOURS):
        one, other = number // NEIGHBOURS, number // NEIGHBOURS + number % NEIGHBOURS + 1
        if other >= groups:
            continue
        here, there = order[one * group_size :][:group_size], order[other * group_size :][:group_size]
        for column in range(2 * len(columns)):
            if column == len(columns):
                here, there = there, here
            heaviest = np.argmax(columns[column % len(columns)][here])
            best, least = -1, -1e-12
            before = _all_imbalance(_rank_sums(columns, here, group_size))
            before += _all_imbalance(_rank_sums(columns, there, group_size))
            for j in range(group_size):
                here[heaviest], there[j] = there[j], here[heaviest]
                change = _all_imbalance(_rank_sums(columns, here, group_size)) - before
                change += _all_imbalance(_rank_sums(columns, there, group_size))
                here[heaviest], there[j] = there[j], here[heaviest]
                if change < least:
                    best, least = j, change
            if best >= 0:
                here[heaviest], there[best] = there[best], here[heaviest]


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
