"""Choose a pack's budgets: the pair that wastes least, near the corpus' ratio of tokens to tiles."""

from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import FURTHER_SIZES, Budgets, Size
from omnibal_ext.packing.ordering.metrics import lower_bound_packs
from omnibal_ext.packing.packers.balanced import pack_balanced
from omnibal_ext.sizes import Sizes

STEP = 64  # token budgets are multiples of this
TRIED_SAMPLES = 20_000  # packed to try a pair; more hardly change the waste
ROOM = (1.0, 1.02, 1.06)  # ratios of the token budget to the mean tokens of as many tiles
MOST_TILE_BUDGETS = 8
TIMES = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # token budgets of a sweep, as multiples of the longest sample
SPARE_UNITS = 1.25  # ratio of the budget of mel frames to the mean frames of as many tokens
NEAR_BOUND = 1.004  # ratio of packs to the lower bound; pairs above it only if none is below


@dataclass(frozen=True, slots=True)
class BudgetTrial:
    """A pair of budgets, and how full packs of some samples were with it."""

    vit_budget: int
    llm_budget: int
    packs_over_bound: float
    waste: float
    """Fraction of the budgets that packs leave unused, mean of tiles and tokens."""
    samples_per_pack: float


def read_budget(text: str) -> int | None:
    """Read a budget: a number, or "auto" (None). Raises ValueError."""
    return None if text == "auto" else int(text)


def choose_budgets(
    sizes: Sizes,
    vit_budget: int | None = None,
    llm_budget: int | None = None,
    *,
    max_llm_budget: int | None = None,
    samples_per_pack: float = 4.0,
    seed: int = 0,
) -> tuple[BudgetTrial, list[BudgetTrial]]:
    """Choose the budgets that are None by trial; return the best pair, and all pairs tried, best first.

    1. List tile budgets from 3/4 to 5/4 of the mean tiles of `samples_per_pack` samples (or of `max_llm_budget` tokens,
       if less), none below the largest sample.
    2. For each, list token budgets: the mean tokens of as many tiles, and slightly more.
    3. Pack a random subset of the samples with each pair.
    4. Take the pair of least waste among those whose packs are near the lower bound.

    Raises:
        UserError: the longest sample exceeds `max_llm_budget`.
    """
    most_tokens = sizes.most("tokens")
    if max_llm_budget is not None and most_tokens > max_llm_budget:
        raise UserError(
            f"the longest sample has {most_tokens} tokens, --max-llm-budget is {max_llm_budget}: raise it, or give "
            "--llm-budget to leave longer samples out"
        )
    part = sizes
    if len(sizes) > TRIED_SAMPLES:
        part = sizes.take(np.random.default_rng(seed).choice(len(sizes), TRIED_SAMPLES, replace=False))
    pairs = _pairs(sizes, vit_budget, llm_budget, max_llm_budget, samples_per_pack)
    trials = [_try(part, vit, llm) for vit, llm in pairs]
    trials.sort(key=lambda trial: (trial.packs_over_bound > NEAR_BOUND, trial.waste, trial.vit_budget))
    return trials[0], trials


def budgets_for(sizes: Sizes) -> list[tuple[int, int]]:
    """Return (tiles, tokens) to try: 1 to 4 times the longest sample's tokens, each with the tiles that waste least."""
    longest = int(sizes.tokens.max())
    tokens = [_in_steps(longest * times) for times in TIMES]
    return [(choose_budgets(sizes, llm_budget=budget)[0].vit_budget, budget) for budget in tokens]


def further_budgets_for(sizes: Sizes, llm_budget: int, given: Budgets | None = None) -> dict[Size, int]:
    """Return budgets of the further sizes that samples have any of, such as mel frames: those `given`, else 1.25 times
    what `llm_budget` tokens bring on average, or the largest sample's if that is more."""

    def fitting(units: NDArray[np.int64]) -> int:
        return max(int(units.max()), ceil(SPARE_UNITS * int(units.sum()) / int(sizes.tokens.sum()) * llm_budget))

    there = {size: sizes.more[size] for size in FURTHER_SIZES if size in sizes.more and sizes.more[size].any()}
    return {size: (given or {}).get(size) or fitting(units) for size, units in there.items()}


def _in_steps(tokens: float) -> int:
    """Round tokens up to a multiple of `STEP` (64)."""
    return -(-int(tokens) // STEP) * STEP


def _pairs(
    sizes: Sizes, vit_budget: int | None, llm_budget: int | None, max_llm_budget: int | None, samples_per_pack: float
) -> list[tuple[int, int]]:
    most_tiles, most_tokens = sizes.most("tiles"), sizes.most("tokens")
    mean_tiles, mean_tokens = sizes.total("tiles") / len(sizes), sizes.total("tokens") / len(sizes)
    limit = llm_budget or max_llm_budget
    if vit_budget is not None:
        vits = [vit_budget]
    elif most_tiles == 0:
        vits = [0]
    else:
        aim = samples_per_pack * mean_tiles
        if llm_budget is not None:
            aim = llm_budget * mean_tiles / mean_tokens
        elif limit is not None:
            aim = min(aim, limit * mean_tiles / mean_tokens)
        low = max(most_tiles, round(0.75 * aim))
        high = max(round(1.25 * aim), low + low // 4)
        vits = sorted(set(np.linspace(low, high, MOST_TILE_BUDGETS).round().astype(int).tolist()))
    if llm_budget is not None:
        return [(vit, llm_budget) for vit in vits]
    pairs = set()
    for vit in vits:
        average = vit * mean_tokens / mean_tiles if mean_tiles > 0 and vit > 0 else samples_per_pack * mean_tokens
        for room in ROOM:
            llm = max(_in_steps(average * room), most_tokens)
            pairs.add((vit, min(llm, limit) if limit is not None else llm))
    return sorted(pairs)


def _try(sizes: Sizes, vit_budget: int, llm_budget: int) -> BudgetTrial:
    fits = np.flatnonzero((sizes.tiles <= vit_budget) & (sizes.tokens <= llm_budget))
    if len(fits) == 0:
        raise UserError(f"no sample fits {vit_budget} tiles and {llm_budget} tokens: raise the budgets")
    sizes = sizes.take(fits)
    packs = len(pack_balanced(sizes, vit_budget, llm_budget, seed=0, fine=False))
    used = [float(sizes.tokens.sum() / (packs * llm_budget))]
    if vit_budget > 0:
        used.append(float(sizes.tiles.sum() / (packs * vit_budget)))
    bound = lower_bound_packs(sizes, {"tiles": vit_budget, "tokens": llm_budget})
    return BudgetTrial(vit_budget, llm_budget, packs / bound, 1.0 - float(np.mean(used)), len(sizes) / packs)
