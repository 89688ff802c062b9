"""How little iterations can differ in size: what no order of the same packs falls below, however it is found.

Ranks that hardly wait run hardly different work, so the packs of an iteration are not free. Three reasons, each a bound
on the variance of the mean rank of iterations, in units of a size:

    alike      one microbatch a rank: an iteration's packs cost the same, and what goes with cost differs as packs do
    whole      ranks have whole tiles: where all have as many, an iteration's mean is a whole number
    short      a rank with packs of few tiles has few, for no pack has more tiles than the fullest: so have the others

Waiting of up to `limit` loosens all of them, and all of it is given to each.
"""

import math

import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.costs import PackCosts

PRICES = np.geomspace(1e-3, 1e3, 61)  # of waiting, at which `whole` is tried


def alike(values: Floats, seconds: Floats, limit: float) -> Floats:
    """Return the least share of each size's variance, [K], that lies between iterations of one microbatch a rank.

    1. A pack is `limit` / (1 - `limit`) mean packs cheaper than the dearest of its iteration, in the mean; and never
       more than it is cheaper than the dearest of all. So squares of seconds within iterations are no more than if
       the cheapest packs had it all.
    2. Between and within iterations, seconds and size go together: with the shares b and w of their variances,
       correlation <= sqrt(b_seconds b_size) + sqrt(w_seconds w_size).

    Args:
        values: sizes of each pack that runs, [P, K].
        seconds: what it costs in all parts, [P].
    """
    if seconds.std() == 0:
        return np.zeros(values.shape[1])
    cheaper = np.sort(seconds.max() - seconds)[::-1]
    allowed = limit / (1 - limit) * seconds.mean() * len(seconds)
    squares = float((cheaper * _paid(cheaper, allowed)).sum()) / len(seconds)
    within = min(1.0, squares / float(seconds.var()))
    deviation = values.std(axis=0)
    covariance = (values - values.mean(axis=0)).T @ (seconds - seconds.mean()) / len(seconds)
    together = np.abs(covariance) / (np.where(deviation > 0, deviation, 1.0) * seconds.std())
    angle = math.asin(math.sqrt(within)) + np.arccos(np.clip(together, 0.0, 1.0))
    return np.where(angle < math.pi / 2, np.cos(angle) ** 2, 0.0)


def _paid(amounts: Floats, allowed: float) -> Floats:
    """Return what is paid of each amount, of the first ones all, if no more than `allowed` is paid together."""
    return np.clip(allowed - (np.cumsum(amounts) - amounts), 0, amounts)


def whole(mean: float, ranks: int, waiting: float) -> float:
    """Return the least variance of iterations' mean ranks, of `mean` whole units, of which `waiting` may be waited.

    A mean x that is no whole number has a rank of ceil(x) or more, for which the others wait by ceil(x) - x. By
    duality: for any price of waiting, the least of squares and price on the straight lines between two values of x.
    """
    grid = np.arange(ranks + 1) / ranks + math.floor(mean)  # further away both are more
    waits = np.ceil(grid - 1e-9) - grid
    low, high = grid <= mean, grid > mean
    share = (mean - grid[low])[:, None] / (grid[high][None] - grid[low][:, None])
    least = 0.0
    for price in PRICES:
        each = (grid - mean) ** 2 + price * waits
        lines = each[low][:, None] * (1 - share) + each[high][None] * share
        least = max(least, float(lines.min()) - price * waiting)
    return least


def short(units: Ints, micro_batches: int, waiting: float) -> float:
    """Return the least variance of iterations' mean ranks, where no pack makes up for those of few units.

    1. A pack that misses more of the fullest pack's units than M mean packs do leaves its rank short of the mean by so
       many, d at least, whatever else the rank runs.
    2. In an iteration, let the fullest rank be short by m (below 0: have more than the mean) and the mean rank by h.
       The rank of each d waits for w >= d - m, so h >= (sum of d + m (D - their number)) / D, and
       h^2 >= m (sum of d) / D >= (sum of d (d - w)) / D.
    3. So waiting takes d / D off the squares for each unit: most for the packs of the largest d, which get it all.
    """
    missing = units.max() - units
    shortness = np.sort(np.maximum(0.0, missing - micro_batches * float(missing.mean())))[::-1]
    allowed = waiting * len(units) / micro_batches
    return float((shortness * (shortness - _paid(shortness, allowed))).sum()) * micro_batches / len(units)


def tile_seconds_of(costs: PackCosts) -> float:
    """Return what a tile costs in a part that runs nothing but tiles; 0 where there is no such part."""
    each = [part["tiles"] for part in costs.parts.values() if {unit for unit in part if part[unit]} == {"tiles"}]
    return each[0] if len(each) == 1 else 0.0


def least_spread(iterations: Ints, loads: Ints, seconds: Floats, tile_seconds: float, limit: float) -> float:
    """Return what the largest spread of tiles, tokens and attention against a random order's cannot be less than.

    Args:
        iterations: pack numbers, [I, D, M], no pack twice.
        loads: of each pack, [P, K]; tiles are the first.
        seconds: of each pack, [P, parts].
        tile_seconds: what each tile costs in a part that runs nothing else; 0 where there is none.
        limit: share of device time that may be spent waiting.
    """
    count, ranks, micro_batches = iterations.shape
    packs, batch, runs = len(loads), ranks * micro_batches, iterations.ravel()
    if count < 2:
        return 0.0
    random = loads.var(axis=0) / batch * (1 - (batch - 1) / (packs - 1))  # of an iteration's mean pack
    least = np.zeros(loads.shape[1])
    if seconds.shape[1] == 1 and micro_batches == 1:
        values = loads[runs].astype(np.float64)
        least = alike(values, seconds[runs, 0], limit) * values.var(axis=0)
    elif seconds.shape[1] > 1 and tile_seconds > 0:
        tiles = loads[runs, 0]
        waiting = limit / (1 - limit) * float(seconds[runs].sum()) / (count * ranks) / tile_seconds
        variance = max(whole(float(tiles.mean()) * micro_batches, ranks, waiting), short(tiles, micro_batches, waiting))
        least[0] = variance / micro_batches**2
    return math.sqrt(float(np.where(random > 0, least / np.where(random > 0, random, 1.0), 0.0).max()))
