"""The compiled part of balanced packing: fill packs one at a time from a grid of sample types.

Samples of equal size are interchangeable, so a pack is repeated until a type runs out: work grows with the number of
distinct sizes, not of samples.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints

PHASES = 3  # token counts tried per row of the grid, see `_wish`; 1 to 9 give as many packs
GOOD_ENOUGH = 1e-3  # waste of a pack at which the search for a better one stops


class Grid(NamedTuple):
    """Remaining samples by type: row r holds samples of `tiles[r]` tiles (descending), column t those of t tokens.

    A column without samples links to a neighbour in `below` and `above`; a chain of links ends at a column with
    samples, or at the first or last column, which are always empty.
    """

    tiles: Ints  # [R]
    counts: NDArray[np.int32]  # [R, most tokens + 2]
    below: NDArray[np.int32]
    above: NDArray[np.int32]
    row_counts: Ints  # [R] samples left
    row_tokens: Ints  # [R] tokens left


class Aim(NamedTuple):
    """Limits of a pack (budgets), its target size, and the cost of unused budget."""

    vit_budget: int
    llm_budget: int
    tiles: float
    tokens: float
    tile_price: float
    token_price: float
    drift_price: float
    """Cost of the difference between a pack's fractions of the target's tiles and tokens."""
    nodes: int
    """Most backtracking steps of a search."""


class FillPlan(NamedTuple):
    """Patterns to follow and how many packs to make of each; empty: search freely."""

    patterns: Ints  # [K, C] samples of each class
    quotas: Ints  # [K]
    class_rows: Ints  # [C] row of the grid
    class_tokens: Floats  # [C] mean


class Seeds(NamedTuple):
    """Types of the grid in the order in which they become the first sample of packs."""

    rows: Ints
    tokens: Ints
    classes: Ints


class _Work(NamedTuple):
    """The pack under construction, where its search is, and the best pack so far: rows and tokens of samples."""

    rows: Ints
    tokens: Ints
    cursor: Ints
    tried: Ints
    best_rows: Ints
    best_tokens: Ints


@numba.njit(cache=True)
def fill_packs(grid: Grid, aim: Aim, seeds: Seeds, plan: FillPlan) -> tuple[Ints, Ints, Ints, Ints]:
    """Fill packs until no sample remains, or with a plan until no seed has a pattern left.

    1. Take the next seed type that has samples left.
    2. With a plan: follow the pattern of the largest quota that has the seed's class, dropping patterns that cannot be
       filled. Then search for text-only samples to add.
    3. Without: search for the samples that complete the pack best.
    4. Make this pack as often as samples and quota allow. Repeat from 1.

    Returns:
        Row and tokens of each sample of all distinct packs, where each pack ends, and how often it is made.
    """
    empty = np.zeros(aim.llm_budget + 2, np.int64)  # a sample has at least one token
    work = _Work(empty, empty.copy(), empty.copy(), empty.copy(), empty.copy(), empty.copy())
    slot_rows, slot_tokens, ends, repeats = [np.int64(0)], [np.int64(0)], [np.int64(0)], [np.int64(0)]
    planned = len(plan.quotas) > 0
    text_row = len(grid.tiles) - 1 if grid.tiles[-1] == 0 else len(grid.tiles)
    for seed in range(len(seeds.rows)):
        while grid.counts[seeds.rows[seed], seeds.tokens[seed]] > 0:
            _put(grid, work, 0, seeds.rows[seed], seeds.tokens[seed])
            depth, pattern = 1, -1
            if planned:
                pattern, depth = _follow_plan(grid, aim, work, plan, seeds.classes[seed])
            if depth > 0:
                found = _search(grid, aim, work, depth, text_row if planned else 0)
            _take_back(grid, work, 0, max(depth, 1))
            if depth == 0:
                break
            times = _times(grid, work, found)
            if planned:
                times = min(times, plan.quotas[pattern])
                plan.quotas[pattern] -= times
            _remove(grid, work, found, times)
            slot_rows.extend(work.best_rows[:found])
            slot_tokens.extend(work.best_tokens[:found])
            ends.append(np.int64(len(slot_rows) - 1))
            repeats.append(np.int64(times))
    return np.array(slot_rows)[1:], np.array(slot_tokens)[1:], np.array(ends)[1:], np.array(repeats)[1:]


@numba.njit(cache=True)
def _follow_plan(grid: Grid, aim: Aim, work: _Work, plan: FillPlan, seed_class: int) -> tuple[int, int]:
    """Complete the pack of a seed, its first sample, by a pattern; return that and how many samples the pack has, (-1,
    0) if none can be filled. Patterns that cannot be filled lose their quota."""
    while seed_class >= 0:
        pattern = -1
        for k in range(len(plan.quotas)):
            if plan.patterns[k, seed_class] > 0 and plan.quotas[k] > max(
                0, plan.quotas[pattern] if pattern >= 0 else 0
            ):
                pattern = k
        if pattern < 0:
            break
        depth = _follow(grid, aim, work, plan, pattern, seed_class)
        if depth > 0:
            return pattern, depth
        plan.quotas[pattern] = 0
    return -1, 0


@numba.njit(cache=True)
def _follow(grid: Grid, aim: Aim, work: _Work, plan: FillPlan, pattern: int, seed_class: int) -> int:
    """Add a pattern's samples to the pack of a seed, each near its class' mean tokens; return how many the pack has; 0,
    and none added, if one is missing."""
    counts = plan.patterns[pattern]
    left = -plan.class_tokens[seed_class]
    for c in range(len(counts)):
        left += counts[c] * plan.class_tokens[c]
    goal = min(left + plan.class_tokens[seed_class], float(aim.llm_budget))
    depth, tokens = 1, work.tokens[0]
    for c in range(len(counts)):
        for _ in range(counts[c] - (c == seed_class)):
            wish = int((goal - tokens) * plan.class_tokens[c] / max(left, 1.0) + 0.5)
            left -= plan.class_tokens[c]
            column = _nearest(grid, plan.class_rows[c], wish, aim.llm_budget - tokens)
            if column == 0:
                _take_back(grid, work, 1, depth)
                return 0
            _put(grid, work, depth, plan.class_rows[c], column)
            depth += 1
            tokens += column
    return depth


@numba.njit(cache=True)
def _search(grid: Grid, aim: Aim, work: _Work, root: int, first_row: int) -> int:
    """Search depth first for samples to add to a pack of `root` samples; return the size of the best pack.

    Rows are tried in order, never above the row of the last sample added.
    """
    depth, tiles, tokens = root, 0, 0
    for i in range(root):
        tiles += grid.tiles[work.rows[i]]
        tokens += work.tokens[i]
    found, least = root, _waste(aim, tiles, tokens)
    _note_best(work, root)
    work.cursor[depth], work.tried[depth] = first_row * PHASES, 0
    nodes = 0
    while least > GOOD_ENOUGH and nodes < aim.nodes:
        row, column = _next_sample(grid, aim, work, depth, tiles, tokens)
        if column > 0:
            _put(grid, work, depth, row, column)
            tiles += grid.tiles[row]
            tokens += column
            depth += 1
            work.cursor[depth], work.tried[depth] = row * PHASES, 0
            waste = _waste(aim, tiles, tokens)
            if waste < least - 1e-9:
                found, least = depth, waste
                _note_best(work, depth)
        elif depth > root:
            nodes += 1  # steps down to the first complete pack are not counted
            depth -= 1
            _take_back(grid, work, depth, depth + 1)
            tiles -= grid.tiles[work.rows[depth]]
            tokens -= work.tokens[depth]
        else:
            break
    _take_back(grid, work, root, depth)
    return found


@numba.njit(cache=True)
def _note_best(work: _Work, depth: int) -> None:
    for i in range(depth):  # numba compiles a loop ten times as fast as slices
        work.best_rows[i], work.best_tokens[i] = work.rows[i], work.tokens[i]


@numba.njit(cache=True)
def _next_sample(grid: Grid, aim: Aim, work: _Work, depth: int, tiles: int, tokens: int) -> tuple[int, int]:
    """Return row and column of the next sample to try at `depth`; column 0: all are tried."""
    while work.cursor[depth] < len(grid.tiles) * PHASES:
        row, phase = work.cursor[depth] // PHASES, work.cursor[depth] % PHASES
        if grid.tiles[row] > aim.vit_budget - tiles or grid.row_counts[row] == 0:
            work.cursor[depth] = (row + 1) * PHASES
            continue
        work.cursor[depth] += 1
        column = _nearest(grid, row, _wish(grid, aim, row, phase, tiles, tokens), aim.llm_budget - tokens)
        if column > 0 and (phase == 0 or column != work.tried[depth]):
            work.tried[depth] = column
            return row, column
        if phase == 0:
            work.tried[depth] = 0
    return 0, 0


@numba.njit(cache=True)
def _wish(grid: Grid, aim: Aim, row: int, phase: int, tiles: int, tokens: int) -> int:
    """Return the tokens to look for in a row, by guess `phase`, for a pack of `tiles` and `tokens` so far."""
    wanted = aim.tokens - tokens
    if phase == 0:  # its fraction of the missing tiles, times the missing tokens
        left = aim.tiles - tiles
        return int(wanted * grid.tiles[row] / left) if 0 < grid.tiles[row] < left else int(wanted)
    if phase == 1:  # missing tokens, divided by the number of samples of this row that usually fit
        return int(wanted / max(1, int(wanted * grid.row_counts[row] / max(1, grid.row_tokens[row]) + 0.5)))
    return aim.llm_budget - tokens  # all remaining budget


@numba.njit(cache=True)
def _waste(aim: Aim, tiles: int, tokens: int) -> float:
    unused = aim.tile_price * (aim.vit_budget - tiles) / max(aim.vit_budget, 1)
    unused += aim.token_price * (aim.llm_budget - tokens) / aim.llm_budget
    return unused + aim.drift_price * abs(tiles / max(aim.tiles, 1e-9) - tokens / aim.tokens)


@numba.njit(cache=True)
def _nearest(grid: Grid, row: int, wish: int, most: int) -> int:
    """Return the largest token count <= `wish` left in `row`, else the smallest <= `most`, else 0."""
    last = grid.counts.shape[1] - 1
    wish = max(0, min(wish, most, last - 1))
    column = _end_of_links(grid.below[row], wish)
    while column > 0 and grid.counts[row, column] == 0:  # all used by the pack under construction
        column = _end_of_links(grid.below[row], column - 1)
    if column > 0:
        return column
    column = _end_of_links(grid.above[row], wish + 1)
    while column < last and grid.counts[row, column] == 0:
        column = _end_of_links(grid.above[row], column + 1)
    return column if column < last and column <= most else 0


@numba.njit(cache=True)
def _end_of_links(links: NDArray[np.int32], start: int) -> int:
    while links[start] != start:
        links[start] = links[links[start]]  # halve the path for the next one
        start = links[start]
    return start


@numba.njit(cache=True)
def _put(grid: Grid, work: _Work, depth: int, row: int, column: int) -> None:
    grid.counts[row, column] -= 1
    work.rows[depth], work.tokens[depth] = row, column


@numba.njit(cache=True)
def _take_back(grid: Grid, work: _Work, first: int, end: int) -> None:
    for i in range(first, end):
        grid.counts[work.rows[i], work.tokens[i]] += 1


@numba.njit(cache=True)
def _times(grid: Grid, work: _Work, found: int) -> np.int64:
    """Return how often the best pack can be made from the remaining samples."""
    for i in range(found):
        work.tried[i] = grid.counts[work.best_rows[i], work.best_tokens[i]]
    for i in range(found):
        grid.counts[work.best_rows[i], work.best_tokens[i]] -= 1
    times = np.int64(1 << 62)
    for i in range(found):
        needed = work.tried[i] - grid.counts[work.best_rows[i], work.best_tokens[i]]
        times = min(times, work.tried[i] // needed)
    for i in range(found):
        grid.counts[work.best_rows[i], work.best_tokens[i]] += 1
    return times


@numba.njit(cache=True)
def _remove(grid: Grid, work: _Work, found: int, times: int) -> None:
    """Remove the samples of the best pack from the grid, `times` times."""
    for i in range(found):
        row, column = work.best_rows[i], work.best_tokens[i]
        grid.counts[row, column] -= times
        grid.row_counts[row] -= times
        grid.row_tokens[row] -= times * column
        if grid.counts[row, column] == 0:
            grid.below[row, column], grid.above[row, column] = column - 1, column + 1
