"""Packs wider than a rank on corpora with long samples: ours, HBP as printed and one width, in one table.

    python benchmarks/wide_packing.py

Three corpora: text as HBP (arXiv 2503.07680) trains on, chats and 2 of 939 samples of 2K to 128K tokens; films, which
are half of the tokens; and the lengths that OmniBal's authors published (folder $OMNIBAL_LENGTHS, or else made-up ones)
beside long documents. Every method packs the same samples, at one budget a rank; the longest sample takes eight.

    wait, spread        seconds that ranks wait, and how much iterations differ (docs/packing.md)
    exchanged, long     share of tokens in samples that are cut, and in samples longer than a rank's budget
    DBR, ABR            levelness of tokens and of sum(len^2) as HBP defines it, iterations that fill no batch left out
    PR, CR, Ave-T       padding, tokens in packs wider than a rank, tokens of a rank and iteration
    once                whether an epoch has every sample exactly once

Naive is the longest packing length for all, in random order; sorted is the same by attention. The last line is the
ratio of shares waited, over all tables.

With --sets ours is packed for every set of widths that holds the longest sample instead, and an epoch's steps are
summed in predicted seconds of the fullest rank, the exchange in teams among them: what `--widths auto` would choose
from. The last line is how much the fastest set brings over the widths that samples need, where it brings most.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpora import films, long_text
from benchmarks.hierarchical import balance_ratio, hierarchical_epoch, naive_epoch
from benchmarks.packing import load
from omnibal_ext.architectures.presets import preset
from omnibal_ext.console import print_table
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import PackSizes
from omnibal_ext.errors import run_tool
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.summary import Summary
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.metrics import rank_loads
from omnibal_ext.packing.pack_epoch import pack_epoch
from omnibal_ext.packing.packs import ATTENTION, LOADS, TOKENS
from omnibal_ext.packing.shard_loads import EXCHANGED, shard_loads
from omnibal_ext.sizes import Sizes

WIDEST = 8
LONG_SHARE = 0.16  # of the tokens of published lengths, in long documents beside them
METHODS = {
    "naive: widest, random": (naive_epoch, (WIDEST,)),
    "sorted: widest": (hierarchical_epoch, (WIDEST,)),
    "HBP as printed": (hierarchical_epoch, (1, WIDEST)),
    "ours": (pack_epoch, (1, 2, 4, WIDEST)),
}


class Case(NamedTuple):
    """A corpus, what a rank holds of it, how many ranks there are, whose seconds count."""

    make: Callable[[int], Sizes]
    samples: int
    budgets: tuple[int, int]
    ranks: int
    model: str


def published(samples: int) -> Sizes:
    """Published lengths, and documents of a third of a rank's budget to eight of them."""
    sizes, _ = load([])
    sizes = sizes.take(np.random.default_rng(0).permutation(len(sizes))[:samples])
    budget = CASES["published"].budgets[1]
    lengths = np.random.default_rng(1).uniform(budget / 3, WIDEST * budget, samples).astype(np.int64)
    tokens = LONG_SHARE / (1 - LONG_SHARE) * int(sizes.tokens.sum())
    lengths = lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), tokens)))]
    tiles = np.concatenate([sizes.tiles.astype(np.int64), np.zeros(len(lengths), np.int64)])
    return Sizes.from_arrays(tiles, np.concatenate([sizes.tokens, lengths]))


CASES = {
    "text": Case(long_text, 117_000, (0, 16_384), 32, "internvl2.5-8b"),
    "films": Case(films, 60_000, (65_536, 16_384), 16, "qwen2.5-vl-7b"),
    "published": Case(published, 100_000, (20, 5888), 16, "internvl2.5-8b"),
}


def once(index: PackedIndex, samples: int) -> bool:
    """Whether the index has every sample exactly once."""
    return bool((np.bincount(index.sample_ids, minlength=samples) == 1).all())


def measure(case: Case, sizes: Sizes, method: str, micro_batches: int) -> tuple[Summary, tuple[float, float], bool]:
    """Pack; return the measures, DBR and ABR, and whether every sample is there once."""
    packer, widths = METHODS[method]
    options = PackOptions(
        "balanced", *case.budgets, data_parallel_size=case.ranks, micro_batches=micro_batches, widths=widths,
        pipeline_model_parallel_size=1,
    )  # fmt: skip
    costs = PackCosts.of_model(case.model, "h100", *case.budgets)
    with tempfile.TemporaryDirectory() as folder:
        index, summary = build_index(sizes, folder, options, costs=costs, packer=packer)
        iterations = epoch_iterations(PackStream(index, case.ranks, micro_batches))
        loads, of_packs = np.asarray(index.loads), np.array([index.width(pack) for pack in range(index.num_packs)])
        dbr, abr = (balance_ratio(iterations, loads[:, column], of_packs) for column in (TOKENS, ATTENTION))
        return summary, (dbr, abr), once(index, len(sizes))


def compare(name: str, case: Case, all_micro_batches: list[int]) -> list[tuple[float, float]]:
    """Print the table of a corpus; return what HBP and ours wait."""
    sizes = case.make(case.samples)
    total, budget = int(sizes.tokens.sum()), case.budgets[1]
    long = float(sizes.tokens[sizes.tokens > budget].sum() / total)
    rows, waits = [], []
    for micro_batches in all_micro_batches:
        found = {method: measure(case, sizes, method, micro_batches) for method in METHODS}
        waits.append((found["HBP as printed"][0].wait, found["ours"][0].wait))
        rows += [
            (
                micro_batches, method, s.iterations, f"{s.wait:.4f}", f"{max(s.spread_sizes, s.spread_sources):.3f}",
                f"{s.tokens_exchanged:.4f}", f"{long:.4f}", f"{dbr:.4f}", f"{s.pad_ratio:.3f}",
                f"{abr:.4f}", f"{s.tokens_in_wide_packs:.4f}", f"{s.tokens_per_rank:,.0f}",
                "yes" if whole else "NO",
            )
            for method, (s, (dbr, abr), whole) in found.items()
        ]  # fmt: skip
    columns = (
        "micro", "method", "steps", "wait", "spread", "exchanged", "long", "DBR", "PR", "ABR", "CR", "Ave-T", "once",
    )  # fmt: skip
    title = f"{name}: {len(sizes):,} samples, {total:,} tokens, {case.ranks} ranks of {budget:,}, {case.model}"
    print_table(title, columns, rows)
    return waits


def epoch_seconds(case: Case, sizes: Sizes, widths: tuple[int, ...], micro_batches: int) -> float:
    """Predicted seconds of an epoch of ours: each step is as long as its fullest rank's layers and exchange."""
    profile = analytic_profile(
        preset(case.model), "h100", {"tiles": max(1, case.budgets[0]), "tokens": case.budgets[1]}
    )
    options = PackOptions(
        "balanced", *case.budgets, data_parallel_size=case.ranks, micro_batches=micro_batches, widths=widths,
        pipeline_model_parallel_size=1,
    )  # fmt: skip
    costs, none_left_out = PackCosts.of_profile(profile), np.zeros(len(sizes), np.int8)
    epoch = pack_epoch(Corpus.of(sizes), none_left_out, options, costs, 0)
    assert epoch.widths is not None
    assert epoch.slots is not None
    loads = shard_loads(epoch.packs, sizes, epoch.widths)
    packs = PackSizes(*loads[:, :3].T, loads[:, -1], epoch.widths)
    seconds = costs.waited_for(loads, (*LOADS, EXCHANGED), one_sum=True)[:, 0]
    seconds += 2 * sum(profile.exchange_seconds(kind, packs) for kind in profile.chain)
    return float(rank_loads(epoch.slots, seconds).max(axis=1).sum())


def compare_sets(name: str, case: Case, all_micro_batches: list[int]) -> float:
    """Print what each set of widths takes; return the most that the fastest brings over those that samples need."""
    sizes = case.make(case.samples)
    narrower = (1, 2, 4)
    sets = [(*some, WIDEST) for count in range(len(narrower) + 1) for some in combinations(narrower, count)]
    taken = {widths: [epoch_seconds(case, sizes, widths, count) for count in all_micro_batches] for widths in sets}
    needed = taken[1, 2, 4, WIDEST]
    rows = [
        (",".join(map(str, widths)), *(f"{one / other:.4f}x" for one, other in zip(needed, seconds, strict=True)))
        for widths, seconds in taken.items()
    ]
    title = f"{name}: epochs in predicted seconds, over those of 1,2,4,{WIDEST}"
    print_table(title, ("widths", *(f"{count} microbatches" for count in all_micro_batches)), rows)
    return max(one / min(others) for one, others in zip(needed, zip(*taken.values(), strict=True), strict=True))


def main() -> None:
    """Compare, print, and end with the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--samples", type=int, help="of each corpus, in place of its own number")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--sets", action="store_true", help="of ours, every set of widths")
    arguments = parser.parse_args()
    cases = {name: CASES[name]._replace(samples=arguments.samples or CASES[name].samples) for name in arguments.corpus}
    if arguments.sets:
        most = max(compare_sets(name, case, arguments.micro_batches) for name, case in cases.items())
        print(f"the fastest set of widths over those that samples need: {most:.4f}x at most")
        return
    hbp, ours = 0.0, 0.0
    for name, case in cases.items():
        for waited, own in compare(name, case, arguments.micro_batches):
            hbp, ours = hbp + waited, ours + own
    print(f"ratio of waiting to HBP's as printed: {ours / hbp:.4f}")


if __name__ == "__main__":
    run_tool(main)
