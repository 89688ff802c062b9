"""What no packs and no order of them could do: how much iterations differ at least where nobody waits.

    python benchmarks/packing_limits.py --corpus "single tiles"

One microbatch a rank. Ranks wait for nobody if the packs of an iteration cost the same, so what costs and cannot be
the same in all packs differs from iteration to iteration. The bound is that of a linear program over all packs that the
budgets allow, not only over those that our packer makes:

    packs       each cut of the corpus into no more packs than ours is allowed, and each mixture of such cuts
    iterations  each pack runs at a level, the seconds of the dearest pack beside it, and waits for what it is cheaper;
                the packs of a level may be shared out at will, so iterations of a level need not differ
    least       the squares of levels' mean tiles, tokens and sum(len^2), less the corpus', over those of a random order
                of packs as they are found: the largest of the three; waiting is 3 thousandths in all

Packs are found as they are needed (column generation): those of the highest value at the current prices, by dynamic
programming over tiles, tokens and sum(len^2). Each round yields a bound that holds (Lagrange), whatever comes later.

Tokens are rounded to whole units, in the corpus that both the bound and our packer see, so that tables are small.
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
from scipy.sparse import csr_matrix, hstack

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpora import UNTUNED
from benchmarks.packing_grid import costs_of
from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.console import print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.options import WAIT, PackOptions
from omnibal_ext.packing.ordering.balance_ranks import assign_zigzag
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.packing.ordering.order_packs import order_packs
from omnibal_ext.packing.packers.balanced import pack_balanced
from omnibal_ext.packing.packs import LOADS, PackList, pack_loads
from omnibal_ext.sizes import Sizes

Pattern = tuple[int, ...]  # types of the samples of a pack, ascending
Placed = tuple[Pattern, int]  # and the level at which it runs
Tangents = dict[tuple[int, int], list[float]]  # by level and size: deviations at which a square is touched

WIDE_STEP = 0.01  # from level to level, where few packs are
FEW = 0.005  # share of packs on either side that are few
TANGENTS = np.geomspace(0.1, 8.0, 8)  # deviations at which squares are touched at first, on either side
APART = 0.02  # from the tangents that there are, to touch where a solution is
NEW = 150  # packs a round, at most
MOST = 9_000  # packs kept, after which those that the solution does not use are forgotten
CLOSE = 0.01  # of the program's value, at which a bound is near enough
NEVER = -1e18
# Tokens that are rounded to, and steps from level to level, in mean packs; within a step waiting costs nothing. Small
# ones are sharper and take longer.
UNITS = {
    "two points": (50, 0.001),
    "single tiles": (32, 0.001),
    "near budget": (64, 0.00025),
    "anti-correlated": (128, 0.001),
    "heavy tails": (64, 0.001),
}


class Problem(NamedTuple):
    """Samples by type, what bounds a pack, and what iterations should have as much of as others; sizes in units."""

    sizes: Ints  # [K, 3] tiles, tokens and squared tokens
    share: Floats  # [K] samples of the type, a pack
    budgets: tuple[int, int, int]
    unit_seconds: Floats  # [3] of a unit of each size, in mean packs, without what a pack costs in itself
    deviations: Floats  # [3] of random iterations' means
    levels: Floats  # [J] the dearest packs of each, likewise; the last is dear enough for all

    @property
    def mean(self) -> Floats:
        """Sizes of a mean pack."""
        return self.share @ self.sizes

    @property
    def cheapest(self) -> Floats:
        """What the dearest pack of an iteration of each level costs at least, [J]."""
        return np.append(0.0, self.levels[:-1])

    def amounts(self, patterns: list[Pattern]) -> csr_matrix:
        """Samples of each type in packs, some of which may be empty, [K, N]."""
        lengths = [len(pattern) for pattern in patterns]
        where = np.concatenate(patterns).astype(np.int64), np.repeat(np.arange(len(patterns)), lengths)
        return csr_matrix((np.ones(sum(lengths)), where), shape=(len(self.sizes), len(patterns)))

    def beyond(self, sums: Floats) -> Floats:
        """What sizes of packs deviate from those of a mean one, [N, 3]."""
        return (sums - self.mean) / self.deviations


class Prices(NamedTuple):
    """What the program's constraints are worth."""

    samples: Floats  # [K]
    pack: float
    slope: Floats  # [J, 3] of a deviation more, at each level
    touch: Floats  # [J] of a pack at each level
    waiting: float


def problem_of(
    sizes: Sizes,
    budgets: tuple[int, int],
    costs: PackCosts,
    packs: PackList,
    unit: int,
    step: float,
    deviations: Floats,
) -> Problem:
    """Count the types of samples, whose tokens are whole units; levels are a `step` apart where most of `packs` are.

    Args:
        deviations: of tiles, tokens and sum(len^2), that count as much as each other; infinite: those do not count.
    """
    types, counts = np.unique(
        np.stack([sizes.tiles.astype(np.int64), sizes.tokens // unit], axis=1), axis=0, return_counts=True
    )
    types = np.column_stack([types, types[:, 1] ** 2])
    grow = np.diag(np.array([1, unit, unit * unit], np.int64))
    once, twice = (costs.waited_for(grow * times, LOADS, True)[:, 0] for times in (1, 2))
    seconds = costs.waited_for(pack_loads(packs, sizes), LOADS, True)[:, 0]
    constant, mean = float((2 * once - twice).mean()), float(seconds.mean())
    unit_seconds = (twice - once) / mean
    room = budgets[1] // unit
    most = budgets[0], room, int(types[:, 1].max()) * room
    low, high = np.quantile((seconds - constant) / mean, [FEW, 1 - FEW])
    dearest = float(most @ unit_seconds)
    levels = [np.arange(0.0, low, WIDE_STEP), np.arange(low, high, step), np.arange(high, dearest, WIDE_STEP)]
    return Problem(
        types,
        counts / len(packs),
        most,
        unit_seconds,
        deviations / [1, unit, unit * unit],
        np.append(np.concatenate(levels), dearest * (1 + 1e-9)),
    )


def patterns_of(packs: PackList, sizes: Sizes, problem: Problem, unit: int) -> list[Pattern]:
    """Return the types of the samples of each pack."""
    number = {(int(t), int(n)): k for k, (t, n, _) in enumerate(problem.sizes)}
    types = [number[int(t), int(n)] for t, n in zip(sizes.tiles, sizes.tokens // unit, strict=True)]
    ends = packs.pack_offsets.tolist()
    return [tuple(sorted(types[sample] for sample in packs.sample_ids[a:b])) for a, b in pairwise(ends)]


def placed(problem: Problem, patterns: list[Pattern], ranks: int) -> set[Placed]:
    """Return packs at the levels at which they run, and at their own; `patterns` stand by iteration, the rest last."""
    own = problem.amounts(patterns).T @ problem.sizes @ problem.unit_seconds
    dearest, whole = own.copy(), len(own) // ranks * ranks
    dearest[:whole] = np.repeat(own[:whole].reshape(-1, ranks).max(axis=1), ranks)
    found = set()
    for seconds in (own, dearest):
        found |= set(zip(patterns, np.searchsorted(problem.levels, seconds - 1e-9).tolist(), strict=True))
    return found


@numba.njit(cache=True)
def most_valuable(sizes: Ints, values: Floats, budgets: tuple[int, int, int]) -> tuple[Floats, NDArray[np.int16]]:
    """Return the highest value of samples that have just so many tiles, tokens and squares; and the type of one."""
    shape = (budgets[0] + 1, budgets[1] + 1, budgets[2] + 1)
    best, among = np.full(shape, NEVER), np.full(shape, -1, np.int16)
    best[0, 0, 0] = 0.0
    for t in range(shape[0]):
        for n in range(shape[1]):
            here, one = best[t, n], among[t, n]
            for i in range(len(sizes)):
                tiles, tokens, squares = sizes[i]
                if tiles > t or tokens > n:
                    continue
                without = best[t - tiles, n - tokens]
                for q in range(squares, shape[2]):
                    value = without[q - squares] + values[i]
                    if value > here[q]:
                        here[q] = value
                        one[q] = i
    return best, among


@numba.njit(cache=True)
def most_saved(
    worth: Floats, unit_seconds: Floats, levels: Floats, cheapest: Floats, lines: Floats, fixed: Floats, waiting: float
) -> tuple[Floats, Ints]:
    """Return what a pack of so many tiles saves at most at each level, [T, J]; and its tokens and squares.

    Args:
        worth: of samples, as `most_valuable` returns it.
        lines: what a tile, a token and a square cost at each level, [J, 3]; and `fixed` a pack, [J].
        waiting: price of a second.
    """
    saved, places = np.full((worth.shape[0], len(levels)), NEVER), np.zeros((worth.shape[0], len(levels), 2), np.int64)
    for t in range(worth.shape[0]):
        for n in range(worth.shape[1]):
            for q in range(worth.shape[2]):
                if worth[t, n, q] <= NEVER / 2:
                    continue
                seconds = unit_seconds[0] * t + unit_seconds[1] * n + unit_seconds[2] * q
                least, at = 1e18, -1
                for level in range(np.searchsorted(levels, seconds - 1e-9), len(levels)):
                    cost = lines[level, 0] * t + lines[level, 1] * n + lines[level, 2] * q + fixed[level]
                    cost += waiting * max(0.0, cheapest[level] - seconds)
                    if cost < least:
                        least, at = cost, level
                if worth[t, n, q] - least > saved[t, at]:
                    saved[t, at] = worth[t, n, q] - least
                    places[t, at] = n, q
    return saved, places


def solve(problem: Problem, known: list[Placed], tangents: Tangents) -> tuple[float, Prices, Floats]:
    """Solve the program over some packs; return its value, a square, its prices, and the share of each pack.

    Unknown are the share of each pack, the squares of each size at each level, and the largest of the sizes' sums. At
    each of its tangents (by level and size) a square is above what its levels' packs deviate by.
    """
    types, count = len(problem.sizes), len(known)
    patterns, level = [pattern for pattern, _ in known], np.array([at for _, at in known])
    amounts = problem.amounts(patterns)
    sums = amounts.T @ problem.sizes
    beyond = problem.beyond(sums)
    squares = {key: count + place for place, key in enumerate(tangents)}
    width = count + len(squares) + 1

    def rows(entries: list[tuple[Floats, Ints]]) -> csr_matrix:
        values, across = (np.concatenate(column) for column in zip(*entries, strict=True))
        ends = np.append(0, np.cumsum([len(entry[0]) for entry in entries]))
        return csr_matrix((values, across, ends), shape=(len(entries), width))

    places = {at: np.flatnonzero(level == at) for at in {at for at, _ in tangents}}
    touching = [
        (np.append(2 * slope * beyond[places[at], size] - slope**2, -1.0), np.append(places[at], squares[at, size]))
        for (at, size), slopes in tangents.items()
        for slope in slopes
    ]
    largest = [
        (np.append(np.ones(len(own)), -1.0), np.append(own, width - 1))
        for own in (np.array([place for key, place in squares.items() if key[1] == size], int) for size in range(3))
    ]
    waited = np.maximum(0.0, problem.cheapest[level] - sums @ problem.unit_seconds)
    every = np.arange(count)
    found = linprog(
        np.append(np.zeros(width - 1), 1.0),
        A_ub=rows([*touching, *largest, (waited, every), (np.ones(count), every)]),
        b_ub=np.concatenate([np.zeros(len(touching) + 3), [WAIT / (1 - WAIT), 1.0]]),
        A_eq=hstack([amounts, csr_matrix((types, width - count))]),
        b_eq=problem.share,
        method="highs",
    )
    if found.status != 0:
        raise UserError(f"the linear program: {found.message}")
    upper = -found.ineqlin.marginals
    slope, touch, row = np.zeros((len(problem.levels), 3)), np.zeros(len(problem.levels)), 0
    for (at, size), slopes in tangents.items():
        weights = upper[row : row + len(slopes)]
        slope[at, size] += 2 * weights @ slopes
        touch[at] += weights @ np.square(slopes)
        row += len(slopes)
    prices = Prices(found.eqlin.marginals, float(upper[-1]), slope, touch, float(upper[-2]))
    return float(found.fun), prices, found.x[:count]


def packs_that_save(problem: Problem, prices: Prices, known: list[Placed]) -> tuple[float, list[Placed]]:
    """Return what any pack saves at most, and packs that save most: one of each number of tiles and level.

    A level at which no pack is known has the prices between those of the levels beside it.
    """
    levels, every = np.array(sorted({at for _, at in known})), np.arange(len(problem.levels))
    slope = np.column_stack([np.interp(every, levels, prices.slope[levels, size]) for size in range(3)])
    lines = slope / problem.deviations
    fixed = prices.pack - lines @ problem.mean - np.interp(every, levels, prices.touch[levels])
    worth, among = most_valuable(problem.sizes, prices.samples, problem.budgets)
    saved, places = most_saved(
        worth, problem.unit_seconds, problem.levels, problem.cheapest, lines, fixed, prices.waiting
    )
    best = np.argsort(-saved, axis=None, kind="stable")[:NEW]
    packs = []
    for tiles, level in zip(*np.unravel_index(best[saved.ravel()[best] > 1e-9], saved.shape), strict=True):
        left, pattern = np.array([tiles, *places[tiles, level]]), []
        while left.any():
            pattern.append(int(among[tuple(left)]))
            left = left - problem.sizes[pattern[-1]]
        packs.append((tuple(sorted(pattern)), int(level)))
    return float(saved.max()), packs


def add_tangents(problem: Problem, packs: list[Placed], shares: Floats, tangents: Tangents) -> None:
    """Add tangents where the levels' means of a solution are."""
    beyond = problem.beyond(problem.amounts([pattern for pattern, _ in packs]).T @ problem.sizes)
    level = np.array([at for _, at in packs])
    for at in np.unique(level).tolist():
        own = shares * (level == at)
        for size, mean in enumerate((own @ beyond / max(own.sum(), 1e-9)).tolist()):
            if np.abs(np.array(tangents[at, size]) - mean).min() > APART:
                tangents[at, size].append(mean)


def least_spread(problem: Problem, known: set[Placed]) -> float:
    """Return the least spread of iterations' means, in the size that spreads most, of all packs in any order.

    Args:
        known: packs that the search begins with, which hold all samples.
    """
    packs, bound = sorted(known), 0.0
    tangents: Tangents = {}
    while True:
        for at in {at for _, at in packs}:
            for size in range(3):
                tangents.setdefault((at, size), [0.0, *TANGENTS, *-TANGENTS])
        value, prices, shares = solve(problem, packs, tangents)
        most, more = packs_that_save(problem, prices, packs)
        bound = max(bound, value - max(0.0, most))
        new = sorted(set(more) - set(packs))
        if not new or value - bound < CLOSE * value:
            return math.sqrt(bound)
        add_tangents(problem, packs, shares, tangents)
        if len(packs) > MOST:
            packs = [pack for pack, share in zip(packs, shares, strict=True) if share > 0]
        packs += new


def our_packs(name: str, sizes: Sizes, options: PackOptions, costs: PackCosts) -> tuple[PackList, PackList]:
    """Return packs as they are found, and our packs in our order."""
    found = pack_balanced(sizes, options.vit_budget, options.llm_budget, seed=0)
    return found, order_packs(Corpus(sizes, (CorpusSource(name, len(sizes)),)), found, options, costs, seed=0)


def compare(name: str, model: str, samples: int, ranks: int) -> list[object]:
    """Return a row of the table: our packs in our order, and the least that any could have."""
    (make, budgets), (unit, step) = UNTUNED[name], UNITS[name]
    sizes, costs = make(samples), costs_of(name, model)
    tokens = np.clip(np.rint(sizes.tokens / unit).astype(np.int64), 1, budgets[1] // unit) * unit
    sizes = Sizes.from_arrays(sizes.tiles, tokens)
    options = PackOptions(vit_budget=budgets[0], llm_budget=budgets[1], data_parallel_size=ranks)
    found, packs = our_packs(name, sizes, options, costs)
    loads = pack_loads(packs, sizes)
    groups = np.arange(len(packs) // ranks * ranks).reshape(-1, ranks)
    random = pack_loads(found, sizes).std(axis=0) / math.sqrt(ranks)
    spread = (loads[groups].mean(axis=1).std(axis=0) / random).tolist()
    waiting = wait(rank_loads(assign_zigzag(groups, ranks), costs.waited_for(loads, LOADS, True)))
    problem = problem_of(sizes, budgets, costs, packs, unit, step, random)
    least = least_spread(problem, placed(problem, patterns_of(packs, sizes, problem, unit), ranks))
    figures = [f"{value:.2f}" for value in (*spread, max(spread), least)]
    return [name, unit, len(found), f"{waiting:.4f}", *figures]


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", choices=list(UNITS), default=list(UNITS))
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--data-parallel-size", type=int, default=8)
    parser.add_argument("--model", default="internvl-chat-1.5", help="whose costs")
    arguments = parser.parse_args()
    rows = [
        compare(name, arguments.model, arguments.samples, arguments.data_parallel_size) for name in arguments.corpus
    ]
    columns = ("corpus", "unit", "packs", "wait", "tiles", "tokens", "attention", "worst", "least")
    print_table(
        f"Spread of iterations of one microbatch a rank over a random order's of packs as found, {arguments.model}",
        columns,
        rows,
    )


if __name__ == "__main__":
    run_tool(main)
