"""AdaPipe, with which ours is compared, is the published dynamic program and no worse: its formulas, recursively.

Each stage is planned by trying every number of layers recomputed in every way, and each tail by trying every cut.
"""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

from benchmarks.adapipe import adapipe_layout
from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import Layout, LayoutProblem

from .instances import random_problem

Tail = tuple[float, float, float, float, float, float]
"""Time, warm-up, ending, pace, forward and backward of its first stage."""


def means(problem: LayoutProblem) -> Iterator[np.ndarray]:
    """Seconds of a layer forward, backward and again, over packs and ranks."""
    tables = problem.tables
    return (table.mean(axis=(1, 2)) for table in (tables.forward, tables.backward, tables.recompute))


def stage(problem: LayoutProblem, s: int, first: int, end: int) -> tuple[float, float] | None:
    """Mean seconds forward and backward of the layers first .. end - 1 on rank s, recomputing the least that fits."""
    tables, (forward, backward, again) = problem.tables, means(problem)
    held = problem.slices((first, end))[0]
    ways_here, columns = problem.columns.options, problem.columns.kinds
    counts = [held[columns.index(kind)] if tables.offered[way] else 0 for way, (_, kind) in enumerate(ways_here)]
    best = None
    for numbers in product(*(range(count + 1) for count in counts)):
        ways, kinds = np.array(numbers), np.array([kind for _, kind in ways_here])
        if any(ways[kinds == kind].sum() > held[columns.index(kind)] for kind in kinds):
            continue
        if problem.rank_bytes(s, held[None], ways[None]) > problem.memory_bytes:
            continue
        seconds = float(held @ backward + ways @ again)
        best = seconds if best is None else min(best, seconds)
    return None if best is None else (float(held @ forward), best)


def put_before(problem: LayoutProblem, s: int, f: float, b: float, tail: Tail) -> Tail:
    _, warm_up, ending, pace, later_f, later_b = tail
    p, n = problem.ranks, problem.microbatches
    warm_up = f + max(warm_up + later_b, (p - s - 1) * f)
    ending = b + max(ending + later_f, (p - s - 1) * b)
    pace = max(pace, f + b)
    return warm_up + ending + max(0, n - p + s) * pace, warm_up, ending, pace, f, b


def least_time(problem: LayoutProblem) -> float | None:
    layers = len(problem.profile.chain)

    @cache
    def tail(s: int, first: int) -> Tail | None:
        if s == problem.ranks:
            return (0.0,) * 6 if first == layers else None
        found = []
        for end in range(first + 1, layers + 1):
            later, one = tail(s + 1, end), stage(problem, s, first, end)
            if later is not None and one is not None:
                found.append(put_before(problem, s, *one, later))
        return min(found, key=lambda entry: entry[0], default=None)

    best = tail(0, 0)
    return best[0] if best else None


def time_of(problem: LayoutProblem, layout: Layout) -> float:
    forward, backward, again = means(problem)
    held, ways = problem.counts(layout)
    tail: Tail = (0.0,) * 6
    for s in reversed(range(problem.ranks)):
        tail = put_before(problem, s, float(held[s] @ forward), float(held[s] @ backward + ways[s] @ again), tail)
    return tail[0]


@pytest.mark.parametrize("seed", range(12))
def test_its_layout_takes_what_the_recursion_finds_least(seed: int) -> None:
    problem = random_problem(seed, chunks=1)
    least = least_time(problem)
    if least is None:
        with pytest.raises(UserError, match="AdaPipe finds no layout"):
            adapipe_layout(problem)
        return
    layout = adapipe_layout(problem)
    assert problem.fits(layout)
    assert list(pairwise(layout.edges))[-1][1] == len(problem.profile.chain)
    assert time_of(problem, layout) == pytest.approx(least)


def test_chunks_are_refused() -> None:
    with pytest.raises(UserError, match="virtual chunks"):
        adapipe_layout(LayoutProblem(random_problem(0).profile, 2, 2, chunks=2))
