"""Mixtures of sample classes that fill packs best: cutting stock by column generation (Gilmore and Gomory, 1961).

A class is a group of samples alike in both sizes. A pattern says how many samples of each class one pack takes. The
linear program "cover all samples with the fewest packs" over all patterns is solved exactly; its value is a far better
estimate of the packs needed than the lower bound of `metrics`.

Plain loops in a fixed order give the same plan on any machine. HiGHS (by scipy) finds as few packs (48 classes, 40
patterns) in six times the time, and which of several optimal plans it returns depends on its version.
"""

import math
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints

TOLERANCE = 1e-7


class Detail(NamedTuple):
    """Precision of a plan, and how long it may take."""

    granules: int  # resolution of the token budget in the knapsack's table, less for large tile budgets
    steps: int  # most steps of the knapsack; a plan that stops there is valid, but may not be optimal
    patterns: int  # most patterns


COARSE = Detail(256, 100_000_000, 400)
FINE = Detail(512, 2_000_000_000, 8_000)
PATTERNS_A_CLASS = 10  # about so many enter until a plan is optimal
MOST_CLASSES = 250


def most_classes(vit_budget: int, detail: Detail) -> int:
    """Return about how many classes a plan can have and still be optimal within its steps."""
    steps = PATTERNS_A_CLASS * (vit_budget + 1) * _granules(vit_budget, detail)  # for each class squared
    return min(MOST_CLASSES, math.isqrt(detail.steps // steps))


def _granules(vit_budget: int, detail: Detail) -> int:
    return detail.granules if vit_budget <= 64 else max(32, 16384 // vit_budget)


class Classes(NamedTuple):
    """Sample classes, in the order in which a pattern is filled."""

    tiles: Ints  # [C] of each sample of the class
    tokens: Floats  # [C] mean
    counts: Ints  # [C]


def plan_patterns(
    classes: Classes, vit_budget: int, llm_budget: int, detail: Detail = COARSE
) -> tuple[Ints, Ints, float]:
    """Find the patterns that cover the samples of all classes with the fewest packs (linear program).

    Returns:
        Patterns int64 [K, C], how many complete packs to make of each [K], and the packs the plan needs before
            rounding.
    """
    granules = _granules(vit_budget, detail)
    tokens = np.maximum(1, np.round(classes.tokens / llm_budget * granules)).astype(np.int64)
    counts = classes.counts.astype(np.float64)
    steps = max(25, min(detail.patterns, detail.steps // (len(tokens) * (vit_budget + 1) * granules)))
    budgets = (vit_budget, granules)
    basis, is_pattern, packs = _solve(classes.tiles, np.minimum(tokens, granules), counts, budgets, steps)
    used = is_pattern & (packs >= 1)
    return np.round(basis[used]).astype(np.int64), packs[used].astype(np.int64), float(packs[is_pattern].sum())


@numba.njit(cache=True)
def _solve(
    tiles: Ints, tokens: Ints, counts: Floats, budgets: tuple[int, int], steps: int
) -> tuple[Floats, NDArray[np.bool_], Floats]:
    """Run the revised simplex method on: minimise the packs, every class covered.

    1. Start with one pattern per class: as many of its samples as fit.
    2. The value of a class is the cost of one more of its samples (the duals).
    3. Enter the slack of a class of negative value, else the pattern of the highest value if that exceeds one pack.
    4. Leave by the smallest ratio; update the inverse of the basis. Repeat from 2 until nothing enters.
    """
    size = len(tiles)
    basis = np.zeros((size, size))  # row i: the i-th column of the program
    inverse = np.zeros((size, size))
    is_pattern = np.ones(size, np.bool_)
    packs = np.zeros(size)
    for i in range(size):
        most = budgets[1] // tokens[i]
        if tiles[i] > 0:
            most = min(most, budgets[0] // tiles[i])
        basis[i, i], inverse[i, i], packs[i] = most, 1.0 / most, counts[i] / most
    for _ in range(steps):
        values = np.zeros(size)
        for i in range(size):
            if is_pattern[i]:
                values += inverse[i]
        lowest = np.argmin(values)
        if values[lowest] < -TOLERANCE:
            entering = np.zeros(size)
            entering[lowest] = -1.0
            enters_pattern = False
        else:
            entering, value = _best_pattern(tiles, tokens, values, budgets)
            enters_pattern = True
            if value <= 1.0 + TOLERANCE:
                break
        leaving = _pivot(inverse, packs, entering)
        if leaving < 0:
            break
        basis[leaving], is_pattern[leaving] = entering, enters_pattern
    return basis, is_pattern, packs


@numba.njit(cache=True)
def _pivot(inverse: Floats, packs: Floats, entering: Floats) -> int:
    """Bring one column into the basis, in place; return the row it took, or -1 if nothing can leave."""
    size = len(packs)
    direction = np.zeros(size)
    for i in range(size):
        for j in range(size):
            direction[i] += inverse[i, j] * entering[j]
    leaving = -1
    for i in range(size):
        if direction[i] > 1e-9:
            ratio = packs[i] / direction[i]
            if leaving < 0 or ratio < packs[leaving] / direction[leaving]:
                leaving = i
    if leaving < 0:
        return -1
    step = packs[leaving] / direction[leaving]
    inverse[leaving] /= direction[leaving]
    for i in range(size):
        if i != leaving:
            packs[i] = max(0.0, packs[i] - step * direction[i])
            inverse[i] -= direction[i] * inverse[leaving]
    packs[leaving] = step
    return leaving


@numba.njit(cache=True)
def _best_pattern(tiles: Ints, tokens: Ints, values: Floats, budgets: tuple[int, int]) -> tuple[Floats, float]:
    """Return the pattern of the highest value within both budgets, and its value (unbounded knapsack)."""
    height, width = budgets[0] + 1, budgets[1] + 1
    best = np.zeros((height, width))
    chosen = np.full((height, width), -1)
    for used_tiles in range(height):
        for i in range(len(tiles)):
            if tiles[i] > used_tiles or values[i] <= 0:
                continue
            for used_tokens in range(tokens[i], width):
                value = best[used_tiles - tiles[i], used_tokens - tokens[i]] + values[i]
                if value > best[used_tiles, used_tokens] + 1e-12:
                    best[used_tiles, used_tokens] = value
                    chosen[used_tiles, used_tokens] = i
    pattern = np.zeros(len(tiles))
    used_tiles, used_tokens = height - 1, width - 1
    while chosen[used_tiles, used_tokens] >= 0:
        i = chosen[used_tiles, used_tokens]
        pattern[i] += 1
        used_tiles -= tiles[i]
        used_tokens -= tokens[i]
    return pattern, best[height - 1, width - 1]
