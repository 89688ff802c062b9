"""What no packs and no order of them could do where ranks run several: tiles are whole, and some packs have but few.

    python benchmarks/packing_limits_tiles.py --data-parallel-size 8 --micro-batches 4

The ViT part waits for the rank of most tiles. A sample that takes more than half of a pack's tokens leaves room for so
many tiles and no more, so its rank has few, whatever else it runs: then the others have few as well, or they wait. The
bound is that of a linear program over all iterations that there can be:

    iteration   the most tiles of a rank, what the others lack of it in all, and how many packs of few tiles it holds
    least       the squares of iterations' tiles, less the corpus', over those of a random order of packs as they are
                found; every sample over half a pack is in one of these packs; waiting is 3 thousandths in all

Iterations are found as they are needed (column generation), those of the highest value by a knapsack. Each round yields
a bound that holds (Lagrange), whatever comes later. Needs scipy, which scikit-learn brings.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpora import UNTUNED
from benchmarks.packing_grid import costs_of
from benchmarks.packing_limits import our_packs
from omnibal_ext.console import print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.packing.deal import deal
from omnibal_ext.packing.level import WAIT_ENOUGH
from omnibal_ext.packing.metrics import rank_loads, wait
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packs import LOADS, pack_loads
from omnibal_ext.packing.teach import random_spread, spread_against_random
from omnibal_ext.sizes import Sizes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NEW = 200  # iterations a round, at most
DEAR = 1e6  # squares, for a pack that no iteration known so far has room for


class Problem(NamedTuple):
    """What iterations there can be, and what all of them hold together."""

    ranks: int
    most: int  # tiles of a rank
    lacking: Ints  # [C] tiles that packs of few lack of a full one, ascending
    share: Floats  # [C] packs that lack so many, an iteration
    aside: float  # of them that may run in no iteration, likewise
    mean: float  # tiles of a mean iteration
    lower: float  # tiles that the iterations that run have beyond the mean, in the mean, at least
    upper: float  # and at most: packs set aside may have few tiles
    waiting: float  # tiles that the ranks of an iteration may lack of the fullest, in the mean


class Iteration(NamedTuple):
    """One way to fill an iteration."""

    fullest: int  # tiles of the fullest rank
    lacked: int  # of it by the others, in all
    holds: tuple[int, ...]  # [C] packs of few tiles

    def beyond(self, problem: Problem) -> float:
        """Tiles that it has more than a mean one."""
        return problem.ranks * self.fullest - self.lacked - problem.mean


def few_tiles(sizes: Sizes, vit_budget: int, llm_budget: int) -> Ints:
    """Return how many samples leave their pack no room for more than so many tiles, [vit_budget].

    Only those of more than half the tokens are counted, no two of which share a pack. What a tile takes at least is
    what it takes in the sample of the fewest tokens a tile.
    """
    tiles, tokens = sizes.tiles.astype(np.int64), sizes.tokens
    with_tiles = tiles > 0
    a_tile = float((tokens[with_tiles] / tiles[with_tiles]).min())
    large = 2 * tokens > llm_budget
    room = tiles[large] + np.floor((llm_budget - tokens[large]) / a_tile + 1e-9).astype(np.int64)
    return np.bincount(room[room < vit_budget], minlength=vit_budget)


@numba.njit(cache=True)
def most_valuable(values: Floats, longer: Ints, lacking: Ints, most: tuple[int, int]) -> tuple[Floats, Ints]:
    """Return the highest value of packs that make ranks wait and lack no more than so many tiles; and one of them."""
    best, last = np.zeros((most[0] + 1, most[1] + 1)), np.full((most[0] + 1, most[1] + 1), -1)
    for waited in range(most[0] + 1):
        for lacked in range(most[1] + 1):
            for kind in range(len(values)):
                if longer[kind] <= waited and lacking[kind] <= lacked:
                    value = best[waited - longer[kind], lacked - lacking[kind]] + values[kind]
                    if value > best[waited, lacked] + 1e-12:
                        best[waited, lacked], last[waited, lacked] = value, kind
    return best, last


class Prices(NamedTuple):
    """What the program's constraints are worth."""

    iteration: float
    beyond: float  # of a tile beyond the mean
    lacked: float  # of one that a rank waits for
    packs: Floats  # [C] of few tiles


def better_iterations(problem: Problem, prices: Prices) -> tuple[float, list[Iteration]]:
    """Return what any iteration saves at most at these prices, and those that save most of their kind.

    A pack that lacks k tiles leaves its rank `most` - k at most, so the rank lacks what the fullest has above that; and
    all that packs lack is what ranks lack of `most`.
    """
    saved: list[tuple[float, Iteration]] = []
    for fullest in range(problem.most + 1):
        room, limit = problem.ranks * (problem.most - fullest), problem.ranks * fullest
        longer = np.maximum(0, fullest - problem.most + problem.lacking)
        best, last = most_valuable(prices.packs, longer, problem.lacking, (limit, room + limit))
        for lacked in range(limit + 1):
            plain = Iteration(fullest, lacked, ())
            more = plain.beyond(problem)
            saves = best[lacked, room + lacked] + prices.iteration + prices.beyond * more
            saves -= prices.lacked * lacked + more**2
            if saves > 1e-9:
                holds, left = np.zeros(len(longer), np.int64), [lacked, room + lacked]
                while (kind := int(last[left[0], left[1]])) >= 0:
                    holds[kind] += 1
                    left = [left[0] - int(longer[kind]), left[1] - int(problem.lacking[kind])]
                saved.append((float(saves), plain._replace(holds=tuple(holds.tolist()))))
    saved.sort(key=lambda found: -found[0])
    return max((saves for saves, _ in saved), default=0.0), [iteration for _, iteration in saved[:NEW]]


def least_square(problem: Problem) -> float:
    """Return the least mean square of iterations' tiles beyond the mean."""
    kinds, bound = len(problem.lacking), 0.0
    known = [Iteration(fullest, 0, (0,) * kinds) for fullest in range(problem.most + 1)]
    none, each, width = np.zeros(kinds), np.eye(kinds), 2 * kinds  # of packs set aside, and of those without a place
    while True:
        beyond = np.array([iteration.beyond(problem) for iteration in known])
        lacked, holds = np.array([i.lacked for i in known]), np.array([i.holds for i in known])
        rows = [np.append(row, np.zeros(width)) for row in (lacked, beyond, -beyond)]
        rows += [np.concatenate([np.zeros(len(known)), none + 1, none]), *np.hstack([-holds.T, -each, -each])]
        limits = [problem.waiting, problem.upper, -problem.lower, problem.aside, *-problem.share]
        ones = np.append(np.ones(len(known)), np.zeros(width))[None]
        squares = np.concatenate([beyond**2, none, none + DEAR])
        found = linprog(squares, np.array(rows), limits, ones, [1.0], method="highs")
        if found.status != 0:
            raise UserError(f"the linear program: {found.message}")
        upper = -found.ineqlin.marginals
        prices = Prices(float(found.eqlin.marginals[0]), float(upper[2] - upper[1]), float(upper[0]), upper[4:])
        most, more = better_iterations(problem, prices)
        bound = max(bound, float(found.fun) - most)
        new = sorted(set(more) - set(known))
        if not new:
            return bound
        known += new


def compare(name: str, model: str, samples: int, ranks: int, micro_batches: int) -> list[object]:
    """Return a row of the table: our packs in our order, and the least that any could have."""
    make, budgets = UNTUNED[name]
    sizes, costs = make(samples), costs_of(name, model)
    options = PackOptions(
        vit_budget=budgets[0], llm_budget=budgets[1], data_parallel_size=ranks, micro_batches=micro_batches
    )
    found, packs = our_packs(name, sizes, options, costs)
    batch, loads = options.global_batch, pack_loads(packs, sizes)
    iterations = len(packs) // batch
    groups = np.arange(iterations * batch).reshape(-1, batch)
    seconds = costs.waited_for(loads, LOADS, options.one_sum)
    low, mean = few_tiles(sizes, *budgets), float(loads[:, 0].mean())
    aside = len(packs) - iterations * batch
    problem = Problem(
        ranks,
        budgets[0] * micro_batches,
        budgets[0] - np.flatnonzero(low)[::-1],
        low[low > 0][::-1] / iterations,
        aside / iterations,
        mean * batch,
        (mean - budgets[0]) * aside / iterations,
        mean * aside / iterations,
        WAIT_ENOUGH / (1 - WAIT_ENOUGH) * float(seconds.sum(axis=1).mean()) * batch / costs.tile_seconds,
    )
    tiles, plain = (pack_loads(own, sizes)[:, :1].astype(np.float64) for own in (packs, found))
    random = float(random_spread(plain, batch)[0])
    spread = spread_against_random(groups, tiles)[0] * random_spread(tiles, batch)[0] / random
    waiting = wait(rank_loads(deal(groups, ranks), seconds))
    least = math.sqrt(least_square(problem)) / random
    return [name, len(packs), int(low.sum()), f"{waiting:.4f}", f"{spread:.2f}", f"{least:.2f}"]


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", choices=list(UNTUNED), default=["heavy tails"])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--data-parallel-size", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--model", default="internvl-chat-1.5", help="whose costs")
    arguments = parser.parse_args()
    shape = arguments.data_parallel_size, arguments.micro_batches
    rows = [compare(name, arguments.model, arguments.samples, *shape) for name in arguments.corpus]
    columns = ("corpus", "packs", "of few tiles", "wait", "tiles", "least")
    print_table(
        f"Spread of iterations' tiles over a random order's of packs as found, {shape[0]} ranks of {shape[1]} packs, "
        f"{arguments.model}",
        columns,
        rows,
    )


if __name__ == "__main__":
    run_tool(main)
