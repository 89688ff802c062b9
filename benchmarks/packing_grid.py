"""Balanced packs on thirteen made-up corpora that nothing was tuned on: how many, who waits, how iterations differ.

    python benchmarks/packing_grid.py --samples 100000

For each corpus the same packs run in our order, in a random one and sorted by length, at 8, 32 and 256 ranks with 1, 4
and 16 microbatches. `wait` is the share of device time spent waiting. `sizes` and `sources` are how much iterations
differ, over what they would in a random order of samples (1 is as good as random, 0 is always the same), the worst of
all sizes and of all sources; `of packs` is the same against a random order of the packs as they were found, which
differ less than samples do, and `least` what sizes cannot fall below there in any order of our packs that waits as
long, about (`spread_bound.py`); `missing` is the share of iterations without a kind of sample, of the kind that is
missing most beyond a random order's. The last line is the ratio of waiting to the random order's, over the whole grid.
"""

import argparse
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpora import UNTUNED
from benchmarks.spread_bound import least_spread, tile_seconds_of
from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.console import print_table
from omnibal_ext.errors import run_tool
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.options import WAIT, PackOptions
from omnibal_ext.packing.ordering.balance_ranks import assign_zigzag
from omnibal_ext.packing.ordering.metrics import dist_ratios, lower_bound_packs, rank_loads, wait
from omnibal_ext.packing.ordering.order_packs import order_packs
from omnibal_ext.packing.ordering.spread import (
    Features,
    iteration_spread,
    missing_kinds,
    pack_features,
    random_spread,
    relative_to,
)
from omnibal_ext.packing.packers.balanced import pack_balanced
from omnibal_ext.packing.packers.first_fit import pack_first_fit
from omnibal_ext.packing.packers.isf import pack_isf
from omnibal_ext.packing.packs import LOADS, TILES, TOKENS, PackList, pack_loads
from omnibal_ext.sizes import Sizes

MICRO_BATCHES = (1, 4, 16)
PATCHES_A_TILE = 1025


def costs_of(name: str, model: str) -> PackCosts:
    """Return the seconds of a model; where sizes are patches, a patch costs its share of a tile."""
    costs = PackCosts.of_model(model)
    if name not in ("patches", "native resolution"):
        return costs
    return PackCosts({**costs.parts, "vision": {"tiles": costs.parts["vision"]["tiles"] / PATCHES_A_TILE}})


def sources_of(sizes: Sizes) -> tuple[Sizes, tuple[CorpusSource, ...]]:
    """Sort the samples into three sources that differ in size, as the files of a real corpus do."""
    leaning = sizes.tokens * np.random.default_rng(1).lognormal(0, 1, len(sizes))
    order = np.argsort(leaning, kind="stable")
    parts = (len(sizes) // 2, len(sizes) // 3, len(sizes) - len(sizes) // 2 - len(sizes) // 3)
    return sizes.take(order), tuple(CorpusSource(f"source {number}", count) for number, count in enumerate(parts))


class Random(NamedTuple):
    """What iterations of a random order would be like."""

    samples: Floats  # [F] deviation of sums, where samples are in random order
    packs: Floats  # [F] the same of packs as they were found
    missing: Floats  # [kinds] share of iterations without the kind

    @classmethod
    def of(cls, corpus: Corpus, found: PackList, batch: int) -> "Random":
        """Of iterations of so many packs, and the samples that these hold."""
        samples, drawn = len(corpus.sizes), len(corpus.sizes) / len(found) * batch
        alone = PackList(np.arange(samples + 1), np.arange(samples))
        each, packs = (pack_features(corpus, one, pack_loads(one, corpus.sizes)) for one in (alone, found))
        return cls(
            random_spread(each.values, drawn, samples),
            random_spread(packs.values, batch, len(found)),
            (1 - each.has.mean(axis=0)) ** drawn,
        )


class Measures(NamedTuple):
    """Of one order of packs; spreads are the worst of all sizes, and of all sources."""

    wait: float
    sizes: float  # against a random order of samples
    sources: float
    sizes_found: float  # against a random order of the packs as they were found
    sources_found: float
    missing: float  # share of iterations without a kind, beyond a random order's
    ratio_vit: float
    ratio_llm: float


def measured(
    order: Ints, loads: Ints, seconds: Floats, features: Features, random: Random, shape: PackOptions
) -> Measures:
    """Measure an order of packs, whole iterations only."""
    batch = shape.global_batch
    groups = order[: len(order) // batch * batch].reshape(-1, batch)
    spread, sizes = iteration_spread(groups, features.values), features.sizes
    by_samples, by_packs = relative_to(spread, random.samples), relative_to(spread, random.packs)
    iterations = assign_zigzag(groups, shape.data_parallel_size)
    return Measures(
        wait(rank_loads(iterations, seconds)),
        float(by_samples[:sizes].max()),
        float(by_samples[sizes:].max(initial=0)),
        float(by_packs[:sizes].max()),
        float(by_packs[sizes:].max(initial=0)),
        max(0.0, float((missing_kinds(groups, features.has) - random.missing).max(initial=0))),
        *(dist_ratios(rank_loads(iterations, loads[:, column])).mean() for column in (TILES, TOKENS)),
    )


def compare_orders(
    name: str, samples: int, model: str, all_ranks: list[int], share: float
) -> list[tuple[list[object], float, float]]:
    """Return rows of the table of orders for one corpus, and what is waited in ours and in a random one."""
    make, budgets = UNTUNED[name]
    sizes, sources = sources_of(make(samples))
    found, costs = pack_balanced(sizes, *budgets, seed=0), costs_of(name, model)
    rows = []
    plain = PackOptions(vit_budget=budgets[0], llm_budget=budgets[1], wait=share)
    for micro, ranks in product(MICRO_BATCHES, all_ranks):
        if ranks * micro * 3 <= len(found):
            shape = replace(plain, data_parallel_size=ranks, micro_batches=micro)
            rows.append(_row(name, Corpus(sizes, sources), found, shape, costs))
    return rows


def _row(
    name: str, corpus: Corpus, found: PackList, options: PackOptions, costs: PackCosts
) -> tuple[list[object], float, float]:
    ranks, batch = options.data_parallel_size, options.global_batch
    packs = order_packs(corpus, found, options, costs, seed=0)
    loads = pack_loads(packs, corpus.sizes)
    features, seconds = pack_features(corpus, packs, loads), costs.waited_for(loads, LOADS, options.one_sum)
    order = np.arange(len(packs))
    chance = np.random.default_rng(0).permutation(len(order))
    length = np.argsort(loads[:, TOKENS], kind="stable")
    expected = Random.of(corpus, found, batch)
    own, random, grouped = (
        measured(one, loads, seconds, features, expected, options) for one in (order, chance, length)
    )
    iterations = assign_zigzag(order[: len(order) // batch * batch].reshape(-1, batch), ranks)
    least = least_spread(iterations, loads, seconds, tile_seconds_of(costs), max(options.wait, own.wait))
    least *= float(relative_to(random_spread(features.values, batch, len(packs)), expected.packs)[: len(LOADS)].max())
    row: list[object] = [name, ranks, options.micro_batches, len(iterations)]
    row += [f"{random.wait:.4f}", f"{grouped.wait:.4f}", f"{own.wait:.4f}"]
    spreads = grouped.sizes, own.sizes, own.sizes_found, least, own.sources, own.sources_found
    row += [f"{value:.2f}" for value in spreads]
    return [*row, f"{own.missing:.3f}", f"{own.ratio_vit:.4f}", f"{own.ratio_llm:.4f}"], own.wait, random.wait


def compare_packs(samples: int) -> None:
    """Print how many packs each way of packing needs."""
    rows = []
    for name, (make, budgets) in UNTUNED.items():
        sizes = make(samples)
        matrix = np.column_stack([sizes.tiles.astype(np.int64), sizes.tokens])
        bound = lower_bound_packs(sizes, dict(zip(("tiles", "tokens"), budgets, strict=True)))
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
    parser.add_argument("--wait", type=float, default=WAIT, metavar="SHARE", help="that may be waited")
    parser.add_argument("--model", nargs="+", default=["internvl-chat-1.5", "internvl2.5-8b"], help="whose costs")
    arguments = parser.parse_args()
    compare_packs(arguments.samples)
    columns = (
        "corpus", "ranks", "micro", "steps", "wait: random", "by length", "ours", "sizes: by length", "ours",
        "of packs", "least", "sources", "of packs", "missing", "Dist ViT", "LLM",
    )  # fmt: skip
    ours = random = 0.0
    for model in arguments.model:
        rows = [
            row
            for name in UNTUNED
            for row in compare_orders(name, arguments.samples, model, arguments.data_parallel_size, arguments.wait)
        ]
        print_table(f"Orders of the same packs, costs of {model}", columns, [row for row, _, _ in rows])
        ours, random = ours + sum(own for _, own, _ in rows), random + sum(chance for _, _, chance in rows)
    print(f"ratio of waiting to a random order's: {ours / random:.4f}")


if __name__ == "__main__":
    run_tool(main)
