"""Packs of samples that a trainer holds in memory: a stream's buffer, or all lengths of a data set.

from omnibal_ext.packing import pack

for group in pack(tiles, tokens, vit_budget=12, llm_budget=4096):
    batch = join([buffer[number] for number in group])
"""

from itertools import pairwise
from typing import Any

import numpy as np

from omnibal_ext.arrays import Floats
from omnibal_ext.errors import UserError
from omnibal_ext.output import say
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.ordering.equalize_packs import equalize_packs, worth_equalizing
from omnibal_ext.packing.packers.balanced import MANY_ROWS, QUICK, pack_balanced
from omnibal_ext.packing.packs import PackList
from omnibal_ext.reading.checks import integer, is_number, shown
from omnibal_ext.sizes import Sizes

BEYOND = ("error", "drop", "alone")


def pack(
    tiles: Any,
    tokens: Any,
    vit_budget: int,
    llm_budget: int,
    *,
    costs: PackCosts | None = None,
    beyond: str = "error",
    seconds: float | None = None,
    seed: int = 0,
) -> list[list[int]]:
    """Return packs as lists of sample numbers: few, within both budgets, and as equal as exchanging samples makes them.

    Packs are in random order. Equal inputs and seed give equal packs on every machine, so that ranks which hold the
    same lengths need not talk. The first call of a process loads compiled code; the first on a machine compiles it,
    for some 15 seconds, into numba's cache (`NUMBA_CACHE_DIR`): `warm_up()` does so beforehand.

    Args:
        tiles: ViT inputs of each sample, [N], whole numbers: image tiles, or patches or visual tokens at native
            resolution; 0 without images.
        tokens: LLM tokens of each sample, image tokens included, [N].
        vit_budget: most tiles of a pack; 0: only text, no sample may have tiles.
        llm_budget: most tokens of a pack.
        costs: packs become equal in its seconds, in every part of the model: `PackCosts.of_model("qwen3-vl-8b")`, or
            seconds per tile, per token and per squared token of your own,
            `PackCosts({"vision": {"tiles": 2e-3}, "language": {"tokens": 1e-5, "attention": 2e-10}})`. Where one rank
            runs all of the model give one part with all of them. None: equal in tiles and in tokens, each as a
            share of its own mean, so that patches are as good as tiles: no size has a price that could be wrong.
        beyond: of a sample beyond a budget: "error" refuses it, "drop" leaves it out and prints a line, "alone" gives
            it a pack of its own.
        seconds: effort for making packs equal, a number of steps given in nominal seconds; 0 leaves packs as they are.
            None: what there is to reach for up to 4,000 samples, 0.5; 1 for 10,000, 10 for 100,000 reach it there.
        seed: decides among equal samples, and orders the packs.

    Raises:
        UserError: sizes that are no lists of whole numbers of one length, a budget or seed that is none, other
            arguments out of range, or, with `beyond` "error", the first sample beyond a budget.
    """
    sizes = Sizes.from_arrays(tiles, tokens, "samples to pack")
    vit_budget, llm_budget = whole("vit_budget", vit_budget), whole("llm_budget", llm_budget, 1)
    seed = whole("seed", seed)
    seconds = _usual_effort(len(sizes)) if seconds is None else seconds
    if not is_number(seconds) or not 0 <= seconds < float("inf"):
        raise UserError(f"seconds={seconds!r}: must be a number of 0 or more")
    if not isinstance(costs, PackCosts | None):
        raise UserError(f"costs must be a PackCosts, got {shown(costs)}: PackCosts({{part: {{'tokens': 1e-5, ...}}}})")
    if beyond not in BEYOND:
        raise UserError(f"beyond={beyond!r}: must be one of {', '.join(BEYOND)}")
    fits = (sizes.tiles <= vit_budget) & (sizes.tokens <= llm_budget)
    kept, outside = np.flatnonzero(fits), np.flatnonzero(~fits)
    if len(outside) and beyond != "alone":
        _report(sizes, int(outside[0]), len(outside), f"{vit_budget} tiles and {llm_budget} tokens", beyond)
    packs = _level(sizes.take(kept), vit_budget, llm_budget, costs, seconds, seed)
    packs = PackList(packs.pack_offsets, kept[packs.sample_ids])
    if beyond == "alone":
        packs = PackList.concatenate([packs, PackList(np.arange(len(outside) + 1), outside)])
    packs = packs.reordered(np.random.default_rng(seed).permutation(len(packs)))
    numbers, ends = packs.sample_ids.tolist(), packs.pack_offsets.tolist()
    return [numbers[first:end] for first, end in pairwise(ends)]


def whole(name: str, value: Any, least: int = 0) -> int:
    """Return `value` as an int, numpy's too. Raises UserError, with `name`, unless it is whole and at least `least`."""
    return integer(least)(name, int(value) if isinstance(value, np.integer) else value)


def _usual_effort(samples: int) -> float:
    """Return the default effort of making packs equal, in nominal seconds: more brings next to nothing, up to 4,000
    samples."""
    return min(0.5, max(0.05, 1.25e-4 * samples))


def _report(sizes: Sizes, sample: int, count: int, budgets: str, beyond: str) -> None:
    """Print that `count` samples are left out, first `sample`; with `beyond` "error" raise UserError instead."""
    what = f"sample {sample} has {sizes.tiles[sample]} tiles and {sizes.tokens[sample]} tokens, a pack holds {budgets}"
    if beyond == "error":
        raise UserError(f'{what}: raise the budgets, or leave such samples out with beyond="drop" ({count} here)')
    say(f"warning: {what}: left out, {count} of {len(sizes)} samples here; larger budgets keep them", error=True)


def _level(
    sizes: Sizes, vit_budget: int, llm_budget: int, costs: PackCosts | None, effort: float, seed: int
) -> PackList:
    """Pack samples that all fit, and exchange some until packs are as equal as possible."""
    # More than all samples have is no limit, and would only take memory.
    vit_budget, llm_budget = (
        min(budget, max(1, int(each.sum(dtype=np.int64))))
        for budget, each in ((vit_budget, sizes.tiles), (llm_budget, sizes.tokens))
    )
    plans = QUICK if len(np.unique(sizes.tiles)) <= MANY_ROWS else ()
    packs = pack_balanced(sizes, vit_budget, llm_budget, seed=seed, fine=False, plans=plans)
    if not worth_equalizing(packs, effort):
        return packs
    columns = np.column_stack([sizes.tiles.astype(np.int64), sizes.tokens])
    work: Floats = columns.astype(np.float64) if costs is None else costs.of_samples(sizes, one_sum=False)
    one_group, every = np.zeros(len(packs), np.int64), np.arange(len(packs))
    budgets = np.array([vit_budget, llm_budget])
    return equalize_packs(packs, columns, budgets, work, every, one_group, seed, effort)


def warm_up() -> None:
    """Pack a few samples, so that numba compiles the packer, for tiles and for patches, before a first call has to."""
    samples = np.arange(150)
    for tiles in (samples % 6, samples):  # of which there are few sizes, and many
        pack(tiles, 10 + 7 * (samples % 50), vit_budget=300, llm_budget=1000)
