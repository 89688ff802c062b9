"""How little iterations can differ in size, and ranks wait: what no order of the same packs falls below.

    python benchmarks/spread_bound.py --data-parallel-size 8 64 512

prints what corpora that are hard to order reach with one microbatch a rank and a pipeline, and these bounds.

Ranks that hardly wait run hardly different work, so the packs of an iteration are not free. Three reasons, each a bound
on the variance of the mean rank of iterations, in units of a size:

    alike      one microbatch a rank: an iteration's packs cost the same, and what goes with cost differs as packs do
    whole      ranks have whole tiles: where all have as many, an iteration's mean is a whole number
    short      a rank with packs of few tiles has few, for no pack has more tiles than the fullest: so have the others

Waiting of up to `limit` loosens all of them, and all of it is given to each. Where each part of a model waits for its
own slowest rank, `alike` holds for each part, as all that is waited may be waited there.
"""

import argparse
import math
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpora import HARD
from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.console import print_table
from omnibal_ext.errors import run_tool
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.options import PackOptions

PRICES = np.geomspace(1e-3, 1e3, 61)  # of waiting, at which `whole` is tried


def alike(values: Floats, seconds: Floats, waited: float) -> Floats:
    """Return the least share of each size's variance, [K], that lies between iterations of one microbatch a rank.

    1. A pack is `waited` seconds cheaper than the dearest of its iteration, in the mean; and never more than it is
       cheaper than the dearest of all. So squares of seconds within iterations are no more than if
       the cheapest packs had it all.
    2. Between and within iterations, seconds and size go together: with the shares b and w of their variances,
       correlation <= sqrt(b_seconds b_size) + sqrt(w_seconds w_size).

    Args:
        values: sizes of each pack that runs, [P, K].
        seconds: what it costs in the parts that wait together, [P].
    """
    if seconds.std() == 0:
        return np.zeros(values.shape[1])
    cheaper = np.sort(seconds.max() - seconds)[::-1]
    squares = float((cheaper * _paid(cheaper, waited * len(seconds))).sum()) / len(seconds)
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


def least_variances(iterations: Ints, loads: Ints, seconds: Floats, tile_seconds: float, limit: float) -> Floats:
    """Return what the variance of iterations' mean packs cannot be less than, of tiles, tokens and further sizes: [K].

    Args:
        iterations: pack numbers, [I, D, M], no pack twice.
        loads: of each pack, [P, K]; tiles are the first.
        seconds: of each pack, [P, parts].
        tile_seconds: what each tile costs in a part that runs nothing else; 0 where there is none.
        limit: share of device time that may be spent waiting.
    """
    (count, ranks, micro_batches), runs = iterations.shape, iterations.ravel()
    least = np.zeros(loads.shape[1])
    waited = limit / (1 - limit) * float(seconds[runs].sum()) / (count * ranks)
    if micro_batches == 1:
        values = loads[runs].astype(np.float64)
        least = np.max([alike(values, part, waited) for part in seconds[runs].T], axis=0) * values.var(axis=0)
    if seconds.shape[1] > 1 and tile_seconds > 0:
        tiles, waiting = loads[runs, 0], waited / tile_seconds
        variance = max(whole(float(tiles.mean()) * micro_batches, ranks, waiting), short(tiles, micro_batches, waiting))
        least[0] = max(least[0], variance / micro_batches**2)
    return least


def least_spread(iterations: Ints, loads: Ints, seconds: Floats, tile_seconds: float, limit: float) -> float:
    """Return what the largest spread of tiles, tokens and attention against a random order's cannot be less than.

    Arguments are those of `least_variances`.
    """
    if len(iterations) < 2:
        return 0.0
    packs, batch = len(loads), iterations[0].size
    random = loads.var(axis=0) / batch * (1 - (batch - 1) / (packs - 1))  # of an iteration's mean pack
    least = least_variances(iterations, loads, seconds, tile_seconds, limit)
    return math.sqrt(float(np.where(random > 0, least / np.where(random > 0, random, 1.0), 0.0).max()))


def least_waiting(seconds: Floats, ranks: int) -> float:
    """Return the share of time that ranks of one pack each wait at least, in an epoch of these packs in any order.

    What completes the last iteration may be any packs: those wait for nobody, and may stand in any iteration here.
    Parts are bounded apart, [P, parts].
    """
    waited = sum(_least_seconds(part, ranks) for part in seconds.T)
    filled = float(seconds.sum() + (-len(seconds) % ranks) * seconds.sum(axis=1).max()) / ranks
    return waited / (waited + filled)


def _least_seconds(seconds: Floats, ranks: int) -> float:
    """Return how long the mean rank waits in all iterations: the dearest packs left, and some free ones, are the next.

    By dynamic programming over the number of free ones used so far.
    """
    dearest = np.sort(seconds)[::-1]
    sums, free = np.append(0.0, np.cumsum(dearest)), -len(seconds) % ranks
    best = np.full(free + 1, np.inf)
    best[0] = 0.0
    for iteration in range((len(seconds) + free) // ranks):
        after = np.full(free + 1, np.inf)
        for used in np.flatnonzero(np.isfinite(best)).tolist():
            first = iteration * ranks - used
            own = ranks - np.arange(min(free - used, ranks - 1) + 1)  # packs of its own
            own = own[first + own <= len(seconds)]
            waits = (own * dearest[first] - (sums[first + own] - sums[first])) / ranks
            to = used + ranks - own
            after[to] = np.minimum(after[to], best[used] + waits)
        best = after
    return float(best[free])


def row(name: str, samples: int, ranks: int) -> list[object]:
    """Return what an order of a corpus reaches, and what none falls below."""
    make, (vit, llm), model = HARD[name]
    sizes, costs = make(samples), PackCosts.of_model(model, vit_budget=max(1, vit), llm_budget=llm)
    sizes = sizes.take(np.flatnonzero((sizes.tiles <= vit) & (sizes.tokens <= llm)))
    options = PackOptions(vit_budget=vit, llm_budget=llm, data_parallel_size=ranks, pipeline_model_parallel_size=2)
    with tempfile.TemporaryDirectory() as folder:
        index, summary = build_index(sizes, Path(folder) / "packs", options, costs=costs)
        seconds, loads = index.seconds(np.arange(index.num_packs)), np.array(index.loads)
        iterations = epoch_iterations(PackStream(index, ranks, 1))[: len(loads) // ranks]
    own, drawn = seconds[iterations[:, :, 0]], len(sizes) / len(loads) * ranks
    waited = 1 - float(own.mean(axis=1).sum() / own.max(axis=1).sum())
    tiles, tokens = sizes.tiles.astype(np.float64), sizes.tokens.astype(np.float64)
    each = np.stack([tiles, tokens, tokens**2]).var(axis=1) * drawn * (1 - (drawn - 1) / (len(sizes) - 1))
    least = least_variances(iterations, loads, seconds, tile_seconds_of(costs), max(options.wait, waited))
    apart = math.sqrt(float(np.where(each > 0, least * ranks**2 / np.where(each > 0, each, 1.0), 0.0).max()))
    figures = f"{summary.wait:.4f}", f"{least_waiting(seconds, ranks):.4f}", f"{summary.wait_last:.4f}"
    return [name, ranks, summary.packs, summary.iterations, *figures, f"{summary.spread_sizes:.2f}", f"{apart:.2f}"]


def main() -> None:
    """Order and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", choices=list(HARD), default=list(HARD))
    parser.add_argument(
        "--samples", type=int, default=30_000, help="at 64 ranks and fewer; with more as many times more"
    )
    parser.add_argument("--data-parallel-size", type=int, nargs="+", default=[8, 64, 512])
    arguments = parser.parse_args()
    columns = ("corpus", "ranks", "packs", "iterations", "wait", "least", "last iteration", "sizes", "least")
    rows = [
        row(name, arguments.samples * max(1, ranks // 64), ranks)
        for name in arguments.corpus
        for ranks in arguments.data_parallel_size
    ]
    print_table(
        "Orders of one microbatch a rank with a pipeline, and what no order of the same packs has", columns, rows
    )


if __name__ == "__main__":
    run_tool(main)
