"""Balanced packing: few packs that use both budgets; a linear program plans mixtures, a search indices samples."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Ints
from omnibal_ext.packing.ordering.metrics import lower_bound_packs
from omnibal_ext.packing.packers.fill import Aim, FillPlan, Grid, Seeds, fill_packs
from omnibal_ext.packing.packers.first_fit import pack_first_fit
from omnibal_ext.packing.packers.patterns import COARSE, FINE, Classes, Detail, most_classes, plan_patterns
from omnibal_ext.packing.packs import PackList, offsets_of
from omnibal_ext.packing.random_bits import below
from omnibal_ext.sizes import Sizes

NO_BUDGETS: Mapping[str, int] = MappingProxyType({})
AT_THE_BOUND = 1.0005
MANY_PACKS = 60_000  # of more, planned ones are kept at the bound: first fit's may be a few less, and less equal
MOST_TYPES_TO_PLAN = 200_000  # with more types packs are filled without a plan
MOST_TO_PLAN = 100_000  # tile counts x tile budget, to which a plan's time is proportional
MOST_CELLS = 32_000_000  # of the grid of types: 400 MB
MANY_ROWS, MOST_STEPS = 128, 6_000_000  # tile counts, and tile counts x types, above which search is slow
MOST_SAMPLES_TO_FIT = 2_000_000  # with more, first fit is not tried: plans of repeated sizes are good enough
DRIFT_PRICE = 0.05  # of leaving other samples than before, besides unused budgets; 0 to .2 give as many packs
SEARCH_NODES = 64
SEARCH_NODES_IN_ALL = 1_000_000


class PlanOptions(NamedTuple):
    """How packs are planned, before the remaining samples are packed by search."""

    classes: int  # per tile count
    rounds: int  # of planning, each for the samples that remain
    most_classes: int = 48
    texts: bool = False  # plan text-only samples too, instead of filling up packs with them
    detail: Detail = COARSE
    nodes: int = SEARCH_NODES  # backtracking steps of a search, at most


NO_PLAN = PlanOptions(0, 0)
PLANS = (NO_PLAN, PlanOptions(1, 1), PlanOptions(6, 8))  # the one with the fewest packs is kept
QUICK = (PlanOptions(0, 0, nodes=8),)  # at most 1% more packs, in an eighth of the time
FAR_FROM_THE_BOUND = 1.001  # ratio of packs to the lower bound above which a fine plan is tried
# The ratio below which a fine plan is kept. Samples that fit together in few mixtures give packs of few kinds: with
# 1.7% fewer packs of anti-correlated samples, iterations differ two to three times as much.
NEAR_THE_BOUND = 1.005
FINE_ROUNDS = 3
SAMPLES_A_CLASS = 50  # at least, in a fine plan


class _PackTypes(NamedTuple):
    """Distinct packs: types of their samples (row * columns + tokens), end of each pack, how many to make of each."""

    types: Ints
    ends: Ints
    repeats: Ints


def pack_balanced(
    sizes: Sizes,
    vit_budget: int,
    llm_budget: int,
    budgets: Mapping[str, int] = NO_BUDGETS,
    *,
    seed: int,
    fine: bool = True,
    plans: tuple[PlanOptions, ...] = PLANS,
) -> PackList:
    """Pack all samples of `sizes`; every sample must fit the budgets alone. `budgets` are those of further sizes.

    1. Search (`_search`), if sizes repeat enough to be counted and there is no further budget.
    2. Unless that reaches the lower bound: first-fit-decreasing. Keep the fewest packs.
    3. If they are still above the bound: search by a plan of many classes. Keep it if that comes near the bound.

    Args:
        fine: do 3, which takes some seconds.
        plans: of 1; none: leave 1 out.
    """
    limits = {name: budget for name, budget in budgets.items() if budget}
    found = _search(sizes, vit_budget, llm_budget, plans, seed) if plans and not limits else None
    bound = lower_bound_packs(sizes, {"tiles": vit_budget, "tokens": llm_budget})
    enough = bound * (AT_THE_BOUND if bound > MANY_PACKS else 1.0)
    if found is None or (len(found) > enough and len(sizes) <= MOST_SAMPLES_TO_FIT):
        fitted = _fit(sizes, np.array([vit_budget, llm_budget, *limits.values()]), list(limits), seed)
        found = fitted if found is None or len(fitted) < len(found) else found
    classes = min(most_classes(vit_budget, FINE), len(sizes) // SAMPLES_A_CLASS)
    if fine and not limits and classes > PLANS[-1].most_classes and len(found) > FAR_FROM_THE_BOUND * bound:
        options = PlanOptions(classes, FINE_ROUNDS, classes, texts=True, detail=FINE)
        planned = _search(sizes, vit_budget, llm_budget, (options,), seed)
        if planned is not None and len(planned) < min(len(found), NEAR_THE_BOUND * bound):
            return planned
    return found


def _fit(sizes: Sizes, budgets: Ints, more: list[str], seed: int) -> PackList:
    """Pack by first-fit-decreasing; `budgets` are those of tiles, tokens and the sizes named in `more`."""
    columns = [sizes.tiles.astype(np.int64), sizes.tokens, *(sizes.more[name] for name in more)]
    fitted = pack_first_fit(np.column_stack(columns), budgets, seed)
    equal = np.empty(len(sizes), np.int64)  # the seed decides among equal samples
    equal[np.lexsort(columns)] = np.lexsort((np.random.default_rng(seed).permutation(len(sizes)), *columns))
    return PackList(fitted.pack_offsets, equal[fitted.sample_ids])


def _search(
    sizes: Sizes, vit_budget: int, llm_budget: int, plans: tuple[PlanOptions, ...], seed: int
) -> PackList | None:
    """Pack all samples, by counts of equal ones; return None if there are too many distinct sizes.

    1. Count the samples of each type: equal tiles and equal tokens.
    2. Fill packs from the counts by each of `plans` (only by those without rounds if there are too many types); stop at
       the lower bound, keep the fewest packs.
    3. Assign samples to the packs, at random among those of a type.
    """
    if len(sizes) == 0:
        return PackList.concatenate([])
    tiles = np.flatnonzero(np.bincount(sizes.tiles))[::-1].copy()
    columns = int(sizes.tokens.max()) + 2
    types_at_most = min(len(sizes), len(tiles) * columns)
    if len(tiles) * columns > MOST_CELLS or (len(tiles) > MANY_ROWS and len(tiles) * types_at_most > MOST_STEPS):
        return None
    row_of = np.zeros(int(tiles[0]) + 1, np.int64)
    row_of[tiles] = np.arange(len(tiles))
    types = row_of[sizes.tiles] * columns + sizes.tokens
    counts = np.bincount(types, minlength=len(tiles) * columns)
    grid_counts = counts.reshape(len(tiles), columns).astype(np.int32)
    enough = AT_THE_BOUND * lower_bound_packs(sizes, {"tiles": vit_budget, "tokens": llm_budget})
    plannable = np.count_nonzero(counts) <= MOST_TYPES_TO_PLAN and len(tiles) * max(1, vit_budget) <= MOST_TO_PLAN
    filled: list[_PackTypes] = []
    for options in plans:
        if plannable or options.rounds == 0:
            filled.append(_fill(_new_grid(tiles, grid_counts), vit_budget, llm_budget, options))
            if filled[-1].repeats.sum() <= enough:
                break
    if not filled:
        return None
    fewest = min(filled, key=lambda packs: int(packs.repeats.sum()))
    offsets = offsets_of(np.repeat(np.diff(fewest.ends, prepend=0), fewest.repeats))
    samples = shuffled_by_type(types, offsets_of(counts), seed)
    return PackList(offsets, _hand_out(fewest, offsets_of(counts), samples))


def _new_grid(tiles: Ints, counts: NDArray[np.int32]) -> Grid:
    column = np.arange(counts.shape[1], dtype=np.int32)
    below = np.where(counts > 0, column, column - 1).astype(np.int32)
    above = np.where(counts > 0, column, column + 1).astype(np.int32)
    below[:, 0], above[:, -1] = 0, counts.shape[1] - 1
    row_counts = counts.sum(axis=1, dtype=np.int64)
    return Grid(tiles, counts.copy(), below, above, row_counts, counts.astype(np.int64) @ column.astype(np.int64))


def _fill(grid: Grid, vit_budget: int, llm_budget: int, options: PlanOptions) -> _PackTypes:
    """Fill packs from a grid until it has no samples left, in place; return the distinct packs.

    1. Plan patterns for the remaining samples and follow them as far as they go.
    2. Repeat 1 up to `options.rounds` times, or until a plan has no complete pack.
    3. Search freely for the remaining samples.
    """
    parts: list[_PackTypes] = []
    for step in [options] * options.rounds + [NO_PLAN._replace(nodes=options.nodes)]:
        rows, tokens = (indices.astype(np.int64) for indices in np.nonzero(grid.counts))
        if len(rows) == 0:
            break
        classes = _classes(grid, rows, tokens, step)
        plan, packs = _plan(grid, rows, tokens, classes, vit_budget, llm_budget, step.detail)
        if step.classes and not plan.quotas.any():
            continue
        size = np.maximum(grid.tiles[rows] / max(vit_budget, 1), tokens / llm_budget)
        order = np.lexsort((tokens, -size))
        aim = _aim(grid, vit_budget, llm_budget, packs, max(8, min(step.nodes, SEARCH_NODES_IN_ALL // len(rows))))
        slot_rows, slot_tokens, ends, repeats = fill_packs(
            grid, aim, Seeds(rows[order], tokens[order], classes[order]), plan
        )
        parts.append(_PackTypes(slot_rows * grid.counts.shape[1] + slot_tokens, ends, repeats))
    shifts = np.cumsum([0] + [len(part.types) for part in parts[:-1]])
    return _PackTypes(
        np.concatenate([part.types for part in parts]),
        np.concatenate([part.ends + shift for part, shift in zip(parts, shifts, strict=True)]),
        np.concatenate([part.repeats for part in parts]),
    )


def _aim(grid: Grid, vit_budget: int, llm_budget: int, packs: float, nodes: int) -> Aim:
    """Return the aim of packs: the mean of `packs` packs; the scarcer a budget, the more its unused part costs."""
    tiles, tokens = int(grid.row_counts @ grid.tiles), int(grid.row_tokens.sum())
    by_tiles, by_tokens = tiles / max(vit_budget, 1), tokens / llm_budget
    packs = max(packs, by_tiles, by_tokens)
    tile_weight, token_weight = (by_tiles / packs) ** 2, (by_tokens / packs) ** 2
    # To the eighth power: unless both are scarce, the scarcer budget decides. Powers of 1 to 32 give as many packs.
    tile_weight, token_weight = tile_weight**2 * tile_weight**2, token_weight**2 * token_weight**2
    tile_price = tile_weight / (tile_weight + token_weight)
    prices = (tile_price, 1 - tile_price, DRIFT_PRICE)
    return Aim(vit_budget, llm_budget, tiles / packs, tokens / packs, *prices, nodes)


def _classes(grid: Grid, rows: Ints, tokens: Ints, options: PlanOptions) -> Ints:
    """Divide the samples of each tile count into classes of equal size, by tokens, numbered from the longest samples.

    Returns:
        The class of each type (rows, tokens), in their order; -1: not planned.
    """
    classes = np.full(len(rows), -1, np.int64)
    planned = np.unique(rows if options.texts else rows[grid.tiles[rows] > 0])
    if options.classes == 0 or len(planned) == 0:
        return classes
    parts = max(1, min(options.classes, options.most_classes // len(planned)))
    number = 0
    for row in planned:
        first, end = np.searchsorted(rows, (row, row + 1))
        before = np.cumsum(grid.counts[row, tokens[first:end]], dtype=np.int64) - 1
        _, rank = np.unique(-(before * parts // (before[-1] + 1)), return_inverse=True)
        classes[first:end] = number + rank
        number += int(rank.max()) + 1
    return classes


def _plan(
    grid: Grid, rows: Ints, tokens: Ints, classes: Ints, vit_budget: int, llm_budget: int, detail: Detail
) -> tuple[FillPlan, float]:
    """Plan patterns for the types (rows, tokens) that have a class; return the plan and the packs it needs."""
    chosen = classes >= 0
    if not chosen.any():
        nothing = np.zeros(0, np.int64)
        return FillPlan(np.zeros((0, 1), np.int64), nothing, nothing, np.zeros(0)), 0.0
    of_type = grid.counts[rows[chosen], tokens[chosen]].astype(np.int64)
    counts = np.bincount(classes[chosen], of_type).astype(np.int64)
    means = np.bincount(classes[chosen], of_type * tokens[chosen]) / counts
    class_rows = np.zeros(len(counts), np.int64)
    class_rows[classes[chosen]] = rows[chosen]
    alike = Classes(grid.tiles[class_rows], means, counts)
    patterns, quotas, packs = plan_patterns(alike, vit_budget, llm_budget, detail)
    return FillPlan(patterns, quotas, class_rows, means), packs


@numba.njit(cache=True)
def shuffled_by_type(types: Ints, starts: Ints, seed: int) -> Ints:
    """Return sample numbers sorted by type, each type in random order (Fisher-Yates, random by position)."""
    next_of_type = starts[:-1].copy()
    samples = np.empty(len(types), np.int64)
    for sample in range(len(types)):
        samples[next_of_type[types[sample]]] = sample
        next_of_type[types[sample]] += 1
    for kind in range(len(starts) - 1):
        first = starts[kind]
        for i in range(starts[kind + 1] - 1, first, -1):
            j = first + below(i - first + 1, seed, i)
            samples[i], samples[j] = samples[j], samples[i]
    return samples


@numba.njit(cache=True)
def _hand_out(filled: _PackTypes, starts: Ints, samples: Ints) -> Ints:
    """Return the sample numbers of all packs, concatenated; each place takes its type's next of `samples`."""
    next_of_type = starts[:-1].copy()
    handed = np.empty(len(samples), np.int64)
    position, first = 0, 0
    for pack in range(len(filled.ends)):
        for _ in range(filled.repeats[pack]):
            for sample in range(first, filled.ends[pack]):
                kind = filled.types[sample]
                handed[position] = samples[next_of_type[kind]]
                next_of_type[kind] += 1
                position += 1
        first = filled.ends[pack]
    return handed
