"""Balanced packs on corpora of ten kinds that nothing was tuned on: how many, who waits, what iterations teach.

    python benchmarks/packing_grid.py --samples 100000

For each corpus the same packs run in our order, in a random one and sorted by length, at 8, 32 and 256 ranks with 1, 4
and 16 microbatches. `wait` is the share of device time spent waiting. `sizes` and `sources` are the spread of iteration
means over a random order's (1 is as good as random, 0 is always the same), the worst of all sizes and of all sources;
`as found` is that of sizes against a random order of the packs before they were made even, which differ more; `least`
is what sizes cannot fall below in any order of the same packs that waits for 3 thousandths (`least.py`); and `missing`
the share of iterations without a kind of sample, of the kind that is missing most beyond a random order's. Ranks are
made even in what they wait for (`even.py`): with one microbatch all seconds, else each part's. The last line is the
ratio of waiting to the random order's, over the whole grid.
"""

import argparse
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpora import UNTUNED
from omnibal_ext.console import print_table
from omnibal_ext.errors import run_tool
from omnibal_ext.packing.arrange import ordered
from omnibal_ext.packing.balanced import pack_balanced
from omnibal_ext.packing.corpus import Corpus, Source
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.deal import deal
from omnibal_ext.packing.first_fit import pack_first_fit
from omnibal_ext.packing.isf import pack_isf
from omnibal_ext.packing.least import least_spread
from omnibal_ext.packing.level import WAIT_ENOUGH
from omnibal_ext.packing.metrics import dist_ratio, lower_bound_packs, rank_loads, wait
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packs import LOADS, TILES, TOKENS, Packs, pack_loads
from omnibal_ext.packing.teach import Features, missing_kinds, pack_features, spread_against_random
from omnibal_ext.sizes import Sizes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MICRO_BATCHES = (1, 4, 16)
PATCHES_A_TILE = 1025


def costs_of(name: str, model: str) -> PackCosts:
    """Return the seconds of a model; where sizes are patches, a patch costs its share of a tile."""
    costs = PackCosts.of_model(model)
    if name != "patches":
        return costs
    return PackCosts({**costs.parts, "vision": {"tiles": costs.parts["vision"]["tiles"] / PATCHES_A_TILE}})


def sources_of(sizes: Sizes) -> tuple[Sizes, tuple[Source, ...]]:
    """Sort the samples into three sources that differ in size, as the files of a real corpus do."""
    leaning = sizes.tokens * np.random.default_rng(1).lognormal(0, 1, len(sizes))
    order = np.argsort(leaning, kind="stable")
    parts = (len(sizes) // 2, len(sizes) // 3, len(sizes) - len(sizes) // 2 - len(sizes) // 3)
    return sizes.take(order), tuple(Source(f"source {number}", count) for number, count in enumerate(parts))


def measured(
    order: Ints, loads: Ints, seconds: Floats, features: Features, less: Floats, ranks: int, micro: int
) -> list[float]:
    """Return wait, the spread of sizes and of sources, kinds missing, the DistRatios of tiles and of tokens; and the
    spread of sizes and of sources against packs that differ so much more that ours differ `less` [F] than they."""
    batch = ranks * micro
    groups = order[: len(order) // batch * batch].reshape(-1, batch)
    spreads = spread_against_random(groups, features.values)
    sizes = len(features.names) - len(features.kinds)
    missing, expected = missing_kinds(groups, features.has)
    iterations = deal(groups, ranks)
    ratios = [dist_ratio(rank_loads(iterations, loads[:, column])) for column in (TILES, TOKENS)]
    spread = [spreads[:sizes].max(), spreads[sizes:].max(initial=0), max(0.0, (missing - expected).max(initial=0))]
    as_found = spreads * less
    found = [float(as_found[:sizes].max()), float(as_found[sizes:].max(initial=0))]
    return [wait(rank_loads(iterations, seconds)), *spread, *ratios, *found]


def compare_orders(
    name: str, samples: int, model: str, all_ranks: list[int]
) -> list[tuple[list[object], float, float]]:
    """Return rows of the table of orders for one corpus, and what is waited in ours and in a random one."""
    make, budgets = UNTUNED[name]
    sizes, sources = sources_of(make(samples))
    found, costs = pack_balanced(sizes, *budgets, seed=0), costs_of(name, model)
    rows = []
    plain = PackOptions(vit_budget=budgets[0], llm_budget=budgets[1])
    for micro, ranks in product(MICRO_BATCHES, all_ranks):
        if ranks * micro * 3 <= len(found):
            shape = replace(plain, data_parallel_size=ranks, micro_batches=micro)
            rows.append(_row(name, Corpus(sizes, sources), found, shape, costs))
    return rows


def _row(
    name: str, corpus: Corpus, found: Packs, options: PackOptions, costs: PackCosts
) -> tuple[list[object], float, float]:
    ranks, micro, batch = options.data_parallel_size, options.micro_batches, options.global_batch
    plain = pack_features(corpus, found, pack_loads(found, corpus.sizes), LOADS).deviations()
    packs = ordered(corpus, found, options, costs, seed=0)
    loads = pack_loads(packs, corpus.sizes)
    features, seconds = pack_features(corpus, packs, loads, LOADS), costs.waited_for(loads, LOADS, options.one_sum)
    less = features.values.std(axis=0) / np.where(plain > 0, plain, 1.0)[: features.values.shape[1]]
    order = np.arange(len(packs))
    chance = np.random.default_rng(0).permutation(len(order))
    length = np.argsort(loads[:, TOKENS], kind="stable")
    own, random, grouped = (
        measured(one, loads, seconds, features, less, ranks, micro) for one in (order, chance, length)
    )
    iterations = deal(order[: len(order) // batch * batch].reshape(-1, batch), ranks)
    least = least_spread(iterations, loads, seconds, costs.tile_seconds, max(WAIT_ENOUGH, own[0]))
    row: list[object] = [name, ranks, micro, len(iterations), f"{random[0]:.4f}", f"{grouped[0]:.4f}", f"{own[0]:.4f}"]
    row += [f"{grouped[1]:.2f}", f"{own[1]:.2f}", f"{own[6]:.2f}", f"{least:.2f}", f"{own[2]:.2f}", f"{own[7]:.2f}"]
    return [*row, f"{own[3]:.3f}", f"{own[4]:.4f}", f"{own[5]:.4f}"], own[0], random[0]


def compare_packs(samples: int) -> None:
    """Print how many packs each way of packing needs."""
    rows = []
    for name, (make, budgets) in UNTUNED.items():
        sizes = make(samples)
        matrix = np.column_stack([sizes.tiles.astype(np.int64), sizes.tokens])
        bound = lower_bound_packs(sizes, *budgets)
        fitted = len(pack_first_fit(matrix, np.array(budgets)))
        own, isf = len(pack_balanced(sizes, *budgets, seed=0)), len(pack_isf(sizes, *budgets, seed=0))
        rows.append((name, str(budgets), bound, isf, fitted, own, f"{own / bound:.4f}", f"{own / fitted:.4f}"))
    columns = (
        "corpus",
        "budgets",
        "lower bound",
        "ISF",
        "first-fit-decreasing",
        "ours",
        "over bound",
        "over first fit",
    )
    print_table(f"Packs of {samples:,} samples", columns, rows)


def main() -> None:
    """Compare, print, and end with the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--data-parallel-size", type=int, nargs="+", default=[8, 32, 256])
    parser.add_argument("--model", nargs="+", default=["internvl-chat-1.5", "internvl2.5-8b"], help="whose costs")
    arguments = parser.parse_args()
    compare_packs(arguments.samples)
    columns = (
        "corpus", "ranks", "micro", "steps", "wait: random", "by length", "ours", "sizes: by length", "ours",
        "as found", "least", "sources", "as found", "missing", "Dist ViT", "LLM",
    )  # fmt: skip
    ours = random = 0.0
    for model in arguments.model:
        rows = [
            row
            for name in UNTUNED
            for row in compare_orders(name, arguments.samples, model, arguments.data_parallel_size)
        ]
        print_table(f"Orders of the same packs, costs of {model}", columns, [row for row, _, _ in rows])
        ours, random = ours + sum(own for _, own, _ in rows), random + sum(chance for _, _, chance in rows)
    print(f"ratio of waiting to a random order's: {ours / random:.4f}")


if __name__ == "__main__":
    run_tool(main)
