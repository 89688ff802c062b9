"""What it brings to rebalance an index for twice as many ranks, on published and on made-up lengths.

    python benchmarks/level.py [--samples 20000] [--corpus "heavy tails" ...]

Each corpus is packed for eight ranks of two and of four packs, and run by sixteen of one and of two: as its packs are
assigned anew there, after `omnibal level`, and packed again for sixteen. `wait` is the share of device time that
ranks wait in an epoch, and DistRatio the worst of tiles and tokens. Published lengths are those of OmniBal's authors
(folder $OMNIBAL_LENGTHS). The last line is the ratio of waiting, rebalanced to not rebalanced, over all corpora.
"""

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.corpora import UNTUNED
from benchmarks.packing import BUDGETS, load
from benchmarks.packing_grid import costs_of
from omnibal_ext.console import print_table
from omnibal_ext.errors import run_tool
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.index.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.rebalanced import RankLayout, rebalance, write_rebalanced
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.metrics import dist_ratios, rank_loads, wait
from omnibal_ext.packing.packs import TILES, TOKENS
from omnibal_ext.sizes import Sizes

PUBLISHED = "published"
RANKS = 8


def corpus_of(name: str, samples: int) -> tuple[Sizes, tuple[int, int]]:
    """Samples that fit the budgets, and these."""
    make, budgets = UNTUNED.get(name, (lambda count: load([])[0], BUDGETS[4]))
    sizes = make(samples)
    sizes = sizes.take(np.flatnonzero((sizes.tiles <= budgets[0]) & (sizes.tokens <= budgets[1])))
    return sizes.take(np.sort(np.random.default_rng(0).permutation(len(sizes))[:samples])), budgets


def measured(index: PackedIndex, ranks: RankLayout) -> tuple[float, float]:
    """What ranks wait in an epoch, and the worse DistRatio."""
    iterations = epoch_iterations(PackStream(index, *ranks))
    loads = [rank_loads(iterations, np.asarray(index.loads)[:, load]) for load in (TILES, TOKENS)]
    waiting = wait(rank_loads(iterations, index.seconds(np.arange(index.num_packs))))
    return waiting, max(float(dist_ratios(load).mean()) for load in loads)


def compare(name: str, samples: int, micro_batches: int, folder: Path) -> list[tuple[float, float]]:
    """Measure at the ranks packed for, at twice as many, there rebalanced, and packed for these."""
    sizes, budgets = corpus_of(name, samples)
    options = PackOptions("balanced", *budgets, data_parallel_size=RANKS, micro_batches=micro_batches)
    more = replace(options, data_parallel_size=2 * RANKS, micro_batches=micro_batches // 2)
    costs = costs_of(name, "internvl-chat-1.5")
    index, anew = (
        build_index(sizes, folder / f"{one.data_parallel_size}", one, costs=costs)[0] for one in (options, more)
    )
    ranks, others = (
        RankLayout(each.data_parallel_size, each.micro_batches, each.last_iteration) for each in (options, more)
    )
    found = [measured(index, ranks), measured(index, others)]
    write_rebalanced(index, others, rebalance(index, PackStream(index, *others).order, others))
    return [*found, measured(index, others), measured(anew, others)]


def main() -> None:
    """Compare, print, and end with the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000, help="of each corpus (default %(default)s)")
    parser.add_argument("--corpus", nargs="+", choices=[PUBLISHED, *UNTUNED], default=[PUBLISHED, *UNTUNED])
    arguments = parser.parse_args()
    rows, waits = [], np.zeros(4)
    for name in arguments.corpus:
        for micro_batches in (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                found = compare(name, arguments.samples, micro_batches, Path(folder))
            rows.append((name, f"{micro_batches}", *(f"{waited:.4f}, {ratio:.4f}" for waited, ratio in found)))
            waits += [waited for waited, _ in found]
    columns = "corpus", "packs a rank", "8 ranks: wait, DistRatio", "16 ranks", "levelled again", "packed for 16"
    print_table("An index packed for 8 ranks, at 16", columns, rows)
    print(f"ratio of waiting at twice as many ranks, levelled again to not: {waits[2] / waits[1]:.4f}")


if __name__ == "__main__":
    run_tool(main)
