"""What no packs in any order could do with samples that fill a pack: level ranks have equally many of them.

    python benchmarks/packing_limits_giants.py --data-parallel-size 8

Packs are full of tokens, so what a giant costs more than short samples, in attention, nothing makes up for. Ranks that
have fewer giants than the fullest one wait, by so much at least:

    more      attention of the giants that the fullest rank has, if they are the smallest
    less      what ranks of fewer have at most: the largest giants, and packs full of the longest of other samples
    tokens    none: all packs are full. What they lack in all counts as waiting that is allowed.

The bound is that of a linear program over the numbers of giants in an iteration: how many iterations have how many,
and what their attention deviates from the mean, within what so many giants have at least and at most. It is the least
spread of attention over a random order's of packs as they are found. Needs scipy, which scikit-learn brings.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpora import UNTUNED
from benchmarks.packing_grid import costs_of
from omnibal_ext.console import print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.packing.balanced import pack_balanced
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.level import WAIT_ENOUGH
from omnibal_ext.packing.packs import LOADS, Packs, pack_loads
from omnibal_ext.packing.teach import random_spread
from omnibal_ext.sizes import Sizes

Floats = NDArray[np.float64]

CORPUS = "giants"
TANGENTS = np.linspace(-6.0, 6.0, 481)  # mean iterations, at which squares are touched
NEVER = math.inf


class Problem(NamedTuple):
    """What iterations have; attention in mean iterations, waiting in seconds."""

    ranks: int
    micro_batches: int
    giants: tuple[float, float]  # an iteration, in the mean: at least and at most
    giant: tuple[float, float]  # attention of a pack with a giant, at least and at most
    others: tuple[float, float]  # of another one
    attention_seconds: float  # of a mean iteration's attention
    tiles_seconds: float  # that a pack without a giant may take longer, for its tiles
    waiting: float  # of all ranks, an iteration

    def gap(self, fullest: int, fewer: int) -> float:
        """What a rank waits at least for the one of most giants, if it has so many fewer."""
        most = (fullest - fewer) * self.giant[1] + (self.micro_batches - fullest + fewer) * self.others[1]
        least = fullest * self.giant[0] + (self.micro_batches - fullest) * self.others[0]
        seconds = self.attention_seconds * (least - most) - self.micro_batches * self.tiles_seconds
        return max(0.0, seconds) if fewer else 0.0

    def waited(self, giants: int) -> float:
        """What ranks wait at least in an iteration of so many giants, however these are dealt."""
        least = NEVER
        for fullest in range(-(-giants // self.ranks), self.micro_batches + 1):
            missing = self.ranks * fullest - giants
            gaps = [self.gap(fullest, fewer) for fewer in range(fullest + 1)]
            best = np.full(missing + 1, NEVER)
            best[0] = 0.0
            for _ in range(self.ranks - 1):
                before = best.copy()
                for fewer in range(1, min(fullest, missing) + 1):
                    best[fewer:] = np.minimum(best[fewer:], before[: len(before) - fewer] + gaps[fewer])
            least = min(least, float(best[missing]))
        return least


def least_square(problem: Problem) -> float:
    """Return the least mean square of what iterations' attention deviates from the mean, over the mean's square.

    Unknown are, for each number of giants: the share of iterations that have so many, what these deviate by in all, and
    their squares, which are above all tangents.
    """
    batch = problem.ranks * problem.micro_batches
    waited = np.array([problem.waited(giants) for giants in range(batch + 1)])
    giants = np.flatnonzero(np.isfinite(waited)).astype(np.float64)
    waited = waited[np.isfinite(waited)]
    low, high = (giants * problem.giant[end] + (batch - giants) * problem.others[end] - 1 for end in (0, 1))
    each, none = np.eye(len(giants)), np.zeros((len(giants), len(giants)))
    rows = [np.hstack([-slope * slope * each, 2 * slope * each, -each]) for slope in TANGENTS]
    rows += [np.hstack([np.diag(low), -each, none]), np.hstack([-np.diag(high), each, none])]
    empty = np.zeros(2 * len(giants))
    sums = [np.append(row, empty)[None] for row in (waited, giants, -giants, np.ones(len(giants)))]
    inside = np.zeros(len(giants) * (len(TANGENTS) + 2))
    found = linprog(
        np.append(empty, np.ones(len(giants))),
        A_ub=np.vstack([*rows, *sums[:3]]),
        b_ub=np.append(inside, [problem.waiting, problem.giants[1], -problem.giants[0]]),
        A_eq=sums[3],
        b_eq=[1.0],
        bounds=[(0, None)] * len(giants) + [(None, None)] * len(giants) + [(0, None)] * len(giants),
        method="highs",
    )
    if found.status != 0:
        raise UserError(f"the linear program: {found.message}")
    return float(found.fun)


def problem_of(
    sizes: Sizes, budgets: tuple[int, int], costs: PackCosts, found: Packs, shape: tuple[int, int]
) -> Problem:
    """Count giants, samples of more than half of a pack's tokens, and bound what packs with and without one have."""
    ranks, micro_batches = shape
    packs, batch, one_sum = len(found), ranks * micro_batches, micro_batches == 1
    iterations = packs // batch
    tokens = sizes.tokens.astype(np.float64)
    giant = 2 * tokens > budgets[1]
    longest, aside = float(tokens[~giant].max()), packs - iterations * batch
    largest = float((tokens[giant] ** 2 + (budgets[1] - tokens[giant]) * longest).max())
    mean = float((tokens**2).sum()) / packs * batch
    language, seconds = costs.parts["language"], float(costs.seconds(pack_loads(found, sizes), LOADS).sum())
    lacking = packs * budgets[1] - float(tokens.sum())
    return Problem(
        ranks,
        micro_batches,
        ((giant.sum() - aside) / iterations, giant.sum() / iterations),
        (float(tokens[giant].min()) ** 2 / mean, largest / mean),
        (0.0, budgets[1] * longest / mean),
        language["attention"] * mean,
        costs.tile_seconds * (budgets[0] - float(sizes.tiles[giant].min())) if one_sum else 0.0,
        WAIT_ENOUGH / (1 - WAIT_ENOUGH) * seconds / packs * batch
        + (ranks - 1) * language["tokens"] * lacking / iterations,
    )


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--data-parallel-size", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--model", nargs="+", default=["internvl-chat-1.5", "internvl2.5-8b"], help="whose costs")
    arguments = parser.parse_args()
    make, budgets = UNTUNED[CORPUS]
    sizes = make(arguments.samples)
    found = pack_balanced(sizes, *budgets, seed=0)
    attention = pack_loads(found, sizes)[:, 2:].astype(np.float64)
    rows: list[list[object]] = []
    for model in arguments.model:
        for shape in ((r, m) for r in arguments.data_parallel_size for m in arguments.micro_batches):
            problem = problem_of(sizes, budgets, costs_of(CORPUS, model), found, shape)
            batch = shape[0] * shape[1]
            mean = float(attention.mean()) * batch
            least = math.sqrt(least_square(problem)) * mean / float(random_spread(attention, batch)[0])
            rows.append([model, *shape, f"{problem.giants[1]:.2f}", f"{least:.2f}"])
    columns = ("model", "ranks", "micro", "giants an iteration", "least")
    print_table("Spread of iterations' attention over a random order's of packs as found", columns, rows)


if __name__ == "__main__":
    run_tool(main)
