"""Packs (or ranks of several) that run beside dearer ones, where levels become more alike than the waiting is worth.

    level     packs that cost the same, so that those of an iteration keep nobody waiting
    lifting   a pack of few tiles among dear ones, all of which have many: it waits, and both levels look more like the
              corpus

Swaps of two packs (`trade.py`) do not get there: the dear pack that makes way would keep a cheap iteration waiting.
Levels have any number of packs, so that each pack chooses for itself.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.random_bits import below
from omnibal_ext.packing.rows import halve

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LOOKS_A_SECOND = 20_000_000  # at a level, for a pack
LEAST_LOOKS, MOST_LOOKS = 64, 1_000  # of a pack: fewer are not worth the while, more bring next to nothing
SWEEPS = 64
AT_ONCE = 16  # levels that a pack looks at before it moves
STEEPEST, CALMER = 4.0, 0.9  # the price of waiting changes by this factor from sweep to sweep, less and less


class _Levels(NamedTuple):
    """What packs add up to that cost the same."""

    dearest: Floats  # [L, parts] seconds
    sums: Floats  # [L, F]
    counts: Ints  # [L]


def lift(
    seconds: Floats, features: Floats, packs: Ints, tolerance: float, spent: float, seed: int, effort: float = 1.0
) -> Floats:
    """Return seconds in which some packs cost what dearer ones do, so that they run beside these.

    1. Halve the packs down to levels that cost as good as the same.
    2. Each pack in turn goes to the level, at least as dear as itself in every part, where the squares of levels' mean
       features, each times its packs, fall by more than the price of what the pack waits longer.
    3. Repeat, at a higher price where more is waited than may be, else at a lower one.

    Args:
        seconds: [P, parts]; not changed.
        features: [P, F], of mean 0.
        packs: those that run.
        tolerance: in seconds, of a level (`rows.halve`).
        spent: share of all seconds that may be waited so, more or less.
        effort: nominal seconds; counts steps.
    """
    looks = int(effort * min(LOOKS_A_SECOND, MOST_LOOKS * len(packs))) // AT_ONCE
    if spent <= 0 or features.shape[1] == 0 or looks * AT_ONCE < LEAST_LOOKS * len(packs):
        return seconds
    order = packs.copy()
    starts = halve(np.ascontiguousarray(seconds.T), order, 1, tolerance)
    counts = np.diff(starts)
    own = np.full(len(seconds), -1, np.int64)
    own[order] = np.repeat(np.arange(len(counts)), counts)
    dearest = np.maximum.reduceat(seconds[order], starts[:-1])
    levels = _Levels(dearest, np.add.reduceat(features[order], starts[:-1]), counts)
    level, waiting = own.copy(), 0.0
    allowed = spent * float(seconds[packs].sum())
    price, factor = float(((levels.sums**2).sum(axis=1) / counts).sum()) / allowed, STEEPEST
    for sweep in range(SWEEPS):
        steps = seed + sweep, looks // SWEEPS
        waiting = _sweep(order, seconds, features, level, own, levels, price, waiting, *steps)
        price *= factor if waiting > allowed else 1 / factor
        factor = 1 + (factor - 1) * CALMER
    moved = packs[level[packs] != own[packs]]
    lifted = seconds.copy()
    lifted[moved] = dearest[level[moved]]
    return lifted


@numba.njit(cache=True)
def _sweep(
    order: Ints,
    seconds: Floats,
    features: Floats,
    level: Ints,
    own: Ints,
    levels: _Levels,
    price: float,
    waiting: float,
    seed: int,
    looks: int,
) -> float:
    """Let packs drawn at random go where they bring most; return what all wait then, which was `waiting`."""
    for look in range(looks):
        pack = order[below(len(order), seed, look * (AT_ONCE + 1))]
        here = level[pack]
        if levels.counts[here] == 1:
            continue
        now = _waited(seconds, levels, pack, here, own[pack])
        leaving = _with(features, levels, pack, here, -1)
        best, to, longer = -1e-9, -1, 0.0
        for number in range(AT_ONCE):
            there = below(len(levels.counts), seed, look * (AT_ONCE + 1) + 1 + number)
            then = _waited(seconds, levels, pack, there, own[pack])
            if there == here or then < 0:
                continue
            change = leaving + _with(features, levels, pack, there, 1) + price * (then - now)
            if change < best:
                best, to, longer = change, there, then - now
        if to >= 0:
            waiting += longer
            level[pack] = to
            levels.counts[here] -= 1
            levels.counts[to] += 1
            for feature in range(features.shape[1]):
                levels.sums[here, feature] -= features[pack, feature]
                levels.sums[to, feature] += features[pack, feature]
    return waiting


@numba.njit(cache=True)
def _waited(seconds: Floats, levels: _Levels, pack: int, level: int, own: int) -> float:
    """Return what a pack waits at a level; nothing at its own, and -1 at one that is cheaper in some part."""
    longer = 0.0
    for part in range(seconds.shape[1]):
        more = levels.dearest[level, part] - seconds[pack, part]
        if more < 0:
            return -1.0
        longer += more
    return 0.0 if level == own else longer


@numba.njit(cache=True)
def _with(features: Floats, levels: _Levels, pack: int, level: int, sign: int) -> float:
    """Return what a level's squares grow by, each over its number of packs, if a pack comes (1) or goes (-1)."""
    before, after = 0.0, 0.0
    for feature in range(features.shape[1]):
        held = levels.sums[level, feature]
        before += held * held
        after += (held + sign * features[pack, feature]) ** 2
    count = levels.counts[level]
    return after / (count + sign) - (before / count if count > 0 else 0.0)
