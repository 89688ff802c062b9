"""What no packs and no order of them could do: how much iterations differ at least where nobody waits.

    python benchmarks/packing_limits.py --corpus "single tiles"

One microbatch a rank. Ranks wait for nobody if the packs of an iteration cost the same, so what costs and cannot be
the same in all packs differs from iteration to iteration. The bound is that of a linear program over all packs that the
budgets allow, not only over those that our packer makes:

    packs       each cut of the corpus into no more packs than ours is allowed, and each mixture of such cuts
    iterations  each pack runs at a level, the seconds of the dearest pack beside it, and waits for what it is cheaper;
                the packs of a level may be shared out at will, so iterations of a level need not differ
    least       the squares of levels' mean tiles, or mean seconds, or seconds and more for tiles, less the corpus';
                waiting is 3 thousandths in all

Seconds are made of tiles, tokens and attention, so one of these differs as much as they do, in random orders: the bound
on seconds, over what the three spread in a random order, each times its seconds, is one on the worst of them. So is the
one on seconds and more for tiles, which says more where tiles alike leave tokens unlike.

Packs are found as they are needed (column generation): those of the highest value at the current prices, by dynamic
programming over tiles, tokens and sum(len^2). Each round yields a bound that holds (Lagrange), whatever comes later.

Tokens are rounded to whole units, in the corpus that both the bound and our packer see, so that tables are small.
Needs scipy, which scikit-learn brings.
"""

import argparse
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_matrix, hstack, vstack

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpora import UNTUNED
from benchmarks.packing_grid import costs_of
from omnibal_ext.console import print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.packing.balanced import pack_balanced
from omnibal_ext.packing.corpus import Corpus, Source
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.deal import deal
from omnibal_ext.packing.epoch import even, ordered
from omnibal_ext.packing.level import WAIT_ENOUGH
from omnibal_ext.packing.metrics import rank_loads, wait
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packs import LOADS, TILES, Packs, pack_loads
from omnibal_ext.sizes import Sizes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Pattern = tuple[int, ...]  # types of the samples of a pack, ascending

STEP = 0.002  # of a mean pack, from level to level; within it waiting costs nothing
CHEAPEST = 0.3  # level, in mean packs; what is cheaper counts as this
TANGENTS = 9  # to a square, on either side
NEW = 60  # patterns a round, at most
MORE_FOR_TILES = 0.5  # of what seconds spread in a random order, for what tiles do
CLOSE = 0.03  # of the program's value, at which a bound is near enough
NEVER = -1e18
# tokens that are rounded to: few enough for a minute or two
UNITS = {"two points": 50, "single tiles": 32, "near budget": 64, "anti-correlated": 128, "heavy tails": 64}


class Problem(NamedTuple):
    """Samples by type, what bounds a pack, and what iterations should have as much of as others; sizes in units."""

    counted: tuple[float, float]  # what a tile counts, and a mean pack's seconds
    tiles: Ints  # [K]
    tokens: Ints  # [K]
    squares: Ints  # [K]
    share: Floats  # [K] samples of the type, a pack
    seconds: Floats  # [K] in mean packs
    budgets: tuple[int, int, int]
    unit_seconds: Floats  # [3] of a unit of each size, in mean packs
    levels: Floats  # [J] in mean packs
    tangents: Floats  # [Y] deviations at which a square is touched

    def beyond(self, tiles: Floats, level: Ints) -> Floats:
        """Return what is counted of packs beyond that of a mean one."""
        seconds = self.levels[level] + STEP / 2 - float((self.seconds * self.share).sum())
        return self.counted[0] * (tiles - float((self.tiles * self.share).sum())) + self.counted[1] * seconds


class Prices(NamedTuple):
    """What the program's constraints are worth."""

    samples: Floats  # [K]
    pack: float
    slope: Floats  # [J] of a tile more than the mean, at each level
    touch: Floats  # [J] of a pack at each level
    waiting: float


def problem_of(sizes: Sizes, budgets: tuple[int, int], costs: PackCosts, packs: int, unit: int) -> Problem:
    """Count the types of samples, whose tokens are whole units; tiles are what iterations should have as much of."""
    types, counts = np.unique(
        np.stack([sizes.tiles.astype(np.int64), sizes.tokens // unit], axis=1), axis=0, return_counts=True
    )
    tiles, tokens = types[:, 0].copy(), types[:, 1].copy()
    grow = np.diag(np.array([1, unit, unit * unit], np.int64))
    once, twice = (costs.waited_for(grow * times, LOADS, True)[:, 0] for times in (1, 2))
    constant, units = float((2 * once - twice).mean()), twice - once
    share = counts / packs
    seconds = np.stack([tiles, tokens, tokens**2], axis=1) @ units
    mean = float((seconds * share).sum()) + constant
    room = budgets[1] // unit
    most = budgets[0], room, int(tokens.max()) * room
    slopes = np.geomspace(0.03, 4, TANGENTS)
    return Problem(
        (1.0, 0.0),
        tiles,
        tokens,
        tokens**2,
        share,
        seconds / mean,
        most,
        units / mean,
        np.arange(CHEAPEST - constant / mean, float(most @ units) / mean + STEP, STEP),
        np.concatenate([[0.0], slopes, -slopes]),
    )


def counting(problem: Problem, tile: float, second: float, near: float) -> Problem:
    """Return the problem for another sum; squares are touched at about the deviation `near`."""
    return problem._replace(counted=(tile, second), tangents=problem.tangents * near)


@numba.njit(cache=True)
def most_valuable(
    tiles: Ints, tokens: Ints, squares: Ints, values: Floats, budgets: tuple[int, int, int]
) -> tuple[Floats, NDArray[np.int16]]:
    """Return the highest value of samples that have just so many tiles, tokens and squares; and the type of one."""
    shape = (budgets[0] + 1, budgets[1] + 1, budgets[2] + 1)
    best, among = np.full(shape, NEVER), np.full(shape, -1, np.int16)
    best[0, 0, 0] = 0.0
    for t in range(shape[0]):
        for n in range(shape[1]):
            here, one = best[t, n], among[t, n]
            for i in range(len(tiles)):
                if tiles[i] > t or tokens[i] > n:
                    continue
                without = best[t - tiles[i], n - tokens[i]]
                for q in range(squares[i], shape[2]):
                    value = without[q - squares[i]] + values[i]
                    if value > here[q]:
                        here[q] = value
                        one[q] = i
    return best, among


def patterns_of(packs: Packs, sizes: Sizes, problem: Problem, unit: int) -> set[Pattern]:
    """Return the types of the samples of each pack."""
    number = {(int(t), int(n)): k for k, (t, n) in enumerate(zip(problem.tiles, problem.tokens, strict=True))}
    types = [number[int(t), int(n)] for t, n in zip(sizes.tiles, sizes.tokens // unit, strict=True)]
    ends = packs.pack_offsets.tolist()
    return {tuple(sorted(types[sample] for sample in packs.sample_ids[a:b])) for a, b in pairwise(ends)}


def level_below(problem: Problem, seconds: Floats) -> Ints:
    """Return the highest level that is not above each of `seconds`."""
    places = np.searchsorted(problem.levels, seconds * (1 + 1e-12), side="right") - 1
    return np.clip(places, 0, len(problem.levels) - 1)


def waited(problem: Problem, own: Ints, at: Ints) -> Floats:
    """Return what packs whose level is `own` wait `at` another, were they as dear as the level above their own."""
    above = np.minimum(own + 1, len(problem.levels) - 1)
    return np.maximum(0.0, problem.levels[at] - problem.levels[above])


def solve(problem: Problem, patterns: list[Pattern]) -> tuple[float, Prices]:
    """Solve the program over some patterns; return its value, a square of tiles, and its prices.

    Unknown are the share of each pattern, of each kind of pack (so many tiles, its own level) at each level that is not
    below its own, and the squares of each level.
    """
    types, levels, count = len(problem.tiles), len(problem.levels), len(patterns)
    lengths = [len(pattern) for pattern in patterns]
    where = np.concatenate(patterns).astype(np.int64), np.repeat(np.arange(count), lengths)
    amounts = csr_matrix((np.ones(sum(lengths)), where), shape=(types, count))
    own = level_below(problem, problem.seconds @ amounts)
    tiles = problem.tiles @ amounts * (problem.counted[0] > 0)
    kinds, kind = np.unique(np.stack([tiles, own], axis=1), axis=0, return_inverse=True)
    lowest = kinds[:, 1].astype(np.int64)
    beyond = problem.beyond(kinds[:, 0], lowest)
    at = np.concatenate([np.arange(low, levels) for low in lowest])
    of = np.repeat(np.arange(len(kinds)), levels - lowest)
    placed, squares = count + np.arange(len(at)), count + len(at) + np.arange(levels)
    width = count + len(at) + levels

    def rows(height: int, *entries: tuple[Floats, Ints, Ints]) -> csr_matrix:
        values, down, across = (np.concatenate(column) for column in zip(*entries, strict=True))
        return csr_matrix((values, (down, across)), shape=(height, width))

    one_each, ones = np.arange(levels), np.ones(len(at))
    links = rows(len(kinds), (np.ones(count), kind.ravel(), np.arange(count)), (-ones, of, placed))
    touching = [
        rows(
            levels,
            (2 * slope * beyond[of] - slope**2, at, placed),
            (-np.ones(levels), one_each, squares),
        )
        for slope in problem.tangents
    ]
    waiting = rows(1, (waited(problem, lowest[of], at), 0 * at, placed))
    packs = rows(1, (np.ones(count), np.zeros(count, np.int64), np.arange(count)))
    found = linprog(
        np.concatenate([np.zeros(width - levels), np.ones(levels)]),
        A_ub=vstack([*touching, waiting, packs]),
        b_ub=np.concatenate([np.zeros(len(touching) * levels), [WAIT_ENOUGH / (1 - WAIT_ENOUGH), 1.0]]),
        A_eq=vstack([hstack([amounts, csr_matrix((types, width - count))]), links]),
        b_eq=np.concatenate([problem.share, np.zeros(len(kinds))]),
        method="highs",
    )
    if found.status != 0:
        raise UserError(f"the linear program: {found.message}")
    upper = -found.ineqlin.marginals
    weights, slopes = upper[:-2].reshape(-1, levels), problem.tangents[:, None]
    return float(found.fun), Prices(
        found.eqlin.marginals[:types],
        float(upper[-1]),
        (2 * slopes * weights).sum(axis=0),
        (slopes**2 * weights).sum(axis=0),
        float(upper[-2]),
    )


def saved(problem: Problem, prices: Prices) -> tuple[Floats, Ints, NDArray[np.int16]]:
    """Return what packs of so many tiles, tokens and squares save at most, their level, and the type of a sample."""
    worth, among = most_valuable(problem.tiles, problem.tokens, problem.squares, prices.samples, problem.budgets)
    t, n, q = np.ogrid[tuple(slice(budget + 1) for budget in problem.budgets)]
    seconds = problem.unit_seconds[0] * t + problem.unit_seconds[1] * n + problem.unit_seconds[2] * q
    own = level_below(problem, seconds)
    every = np.arange(len(problem.levels))
    tiles = np.arange(problem.budgets[0] + 1)[:, None]
    cheapest = np.empty((problem.budgets[0] + 1, len(every)))
    for low in every:
        beyond = problem.beyond(tiles, np.full_like(tiles, low))
        cost = prices.slope * beyond - prices.touch + prices.waiting * waited(problem, np.array([low]), every)
        cheapest[:, low] = cost[:, low:].min(axis=1)
    saving = worth - cheapest[t, own] - prices.pack
    saving[worth <= NEVER / 2] = NEVER
    return saving, own, among


def new_patterns(problem: Problem, saving: Floats, own: Ints, among: NDArray[np.int16]) -> list[Pattern]:
    """Return packs that save most, two of each number of tiles and three levels."""
    taken: dict[tuple[int, int], int] = {}
    patterns = []
    flat = saving.ravel()
    some = np.argpartition(flat, -20_000)[-20_000:] if len(flat) > 20_000 else np.arange(len(flat))
    for place in some[np.argsort(-flat[some], kind="stable")]:
        if flat[place] <= 1e-9 or len(patterns) == NEW:
            break
        t, n, q = (int(size) for size in np.unravel_index(place, saving.shape))
        key = (t, int(own[t, n, q]) // 3)
        taken[key] = taken.get(key, 0) + 1
        if taken[key] > 2:
            continue
        pattern = []
        while t + n > 0:
            kind = int(among[t, n, q])
            pattern.append(kind)
            t, n, q = t - int(problem.tiles[kind]), n - int(problem.tokens[kind]), q - int(problem.squares[kind])
        patterns.append(tuple(sorted(pattern)))
    return patterns


def least_spread(problem: Problem, patterns: set[Pattern]) -> float:
    """Return the least spread of iterations' means, of all packs in any order; some packs begin the search."""
    known, bound = sorted(patterns), 0.0
    while True:
        value, prices = solve(problem, known)
        saving, own, among = saved(problem, prices)
        bound = max(bound, value - max(0.0, float(saving.max())))
        more = [pattern for pattern in new_patterns(problem, saving, own, among) if pattern not in patterns]
        if not more or value - bound < CLOSE * value:
            return max(0.0, math.sqrt(bound) - problem.counted[1] * STEP / 2)
        known += sorted(set(more))
        patterns = patterns | set(more)


def compare(name: str, model: str, samples: int, unit: int, ranks: int) -> list[object]:
    """Return a row of the table: our packs in our order, and the least that any could have."""
    make, budgets = UNTUNED[name]
    sizes, costs = make(samples), costs_of(name, model)
    tokens = np.clip(np.rint(sizes.tokens / unit).astype(np.int64), 1, budgets[1] // unit) * unit
    sizes = Sizes.from_arrays(sizes.tiles, tokens)
    found = pack_balanced(sizes, *budgets, seed=0)
    options = PackOptions(vit_budget=budgets[0], llm_budget=budgets[1], data_parallel_size=ranks)
    evened = even(found, sizes, options, costs, seed=0)
    packs = ordered(Corpus(sizes, (Source(name, samples),)), evened, found, options, costs, seed=0)
    loads = pack_loads(packs, sizes)
    seconds = costs.waited_for(loads, LOADS, True)
    groups = np.arange(len(packs) // ranks * ranks).reshape(-1, ranks)
    spread = loads[groups].mean(axis=1).std(axis=0)
    random = [pack_loads(some, sizes).std(axis=0) / math.sqrt(ranks) for some in (packs, found)]
    problem = problem_of(sizes, budgets, costs, len(found), unit)
    patterns = patterns_of(found, sizes, problem, unit) | patterns_of(evened, sizes, problem, unit)
    of_sizes = problem.unit_seconds / [1, unit, unit**2]  # seconds of a tile, a token, a square
    more = MORE_FOR_TILES * float(random[1] @ of_sizes) / float(random[1][TILES])
    waiting = wait(rank_loads(deal(groups, ranks), seconds))
    figures: list[object] = [name, unit, len(found), f"{waiting:.4f}"]
    bounds = np.zeros(len(random))
    for tile, second in ((1.0, 0.0), (0.0, 1.0), (more, 1.0)):
        counted = (tile * loads[groups, TILES] + second * seconds[groups, 0] / seconds.mean()).mean(axis=1)
        least = least_spread(counting(problem, tile, second, float(counted.std())), patterns)
        figures += [f"{counted.std():.4f}", f"{least:.4f}"]
        each = second * of_sizes + [tile, 0.0, 0.0]
        bounds = np.maximum(bounds, [least / float(below @ each) for below in random])
    for below, bound in zip(random, bounds, strict=True):
        figures += [f"{(spread / below).max():.2f}", f"{bound:.2f}"]
    return figures


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", choices=list(UNITS), default=list(UNITS))
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--data-parallel-size", type=int, default=8)
    parser.add_argument("--model", default="internvl-chat-1.5", help="whose costs")
    arguments = parser.parse_args()
    rows = [
        compare(name, arguments.model, arguments.samples, UNITS[name], arguments.data_parallel_size)
        for name in arguments.corpus
    ]
    columns = (
        "corpus", "unit", "packs", "wait", "tiles", "least", "seconds", "least", "both", "least",
        "sizes", "least", "as found", "least",
    )  # fmt: skip
    print_table(f"Spread of iterations of one microbatch a rank, costs of {arguments.model}", columns, rows)


if __name__ == "__main__":
    run_tool(main)
