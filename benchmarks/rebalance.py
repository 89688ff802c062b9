"""Batches balanced as they come: how level random ones become, what crosses nodes, how long a plan takes.

    python benchmarks/rebalance.py

Random samples of a made-up instruction corpus, so many a rank, on nodes of eight. `wait` is the share of a phase's time
that ranks wait for the fullest one (DistRatio), as read, dealt the longest first, and ours; `fullest` is that rank over
what it must have (the mean, or the longest sample, in whole tiles); `across` is the share of tokens' bytes that cross
nodes, with batches left where they are numbered and where ours are placed. The last line is the ratio of the steps'
seconds, vision and then language, ours over as read.
"""

import argparse
import heapq
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.console import print_table
from omnibal_ext.errors import run_tool
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.ordering.metrics import wait
from omnibal_ext.rebalance.phases import Phase, phases_of
from omnibal_ext.rebalance.plan import PhaseInput, place_batches, plan_step

A_NODE = 8
SHAPES = ((8, 4), (32, 4), (256, 4), (8, 16), (32, 16), (256, 16))
BYTES_A_TILE, BYTES_A_TOKEN, BYTES_OF_FEATURES = 3 * 448 * 448.0, 16.0, 256 * 8192.0


def fraction_across_nodes(rank_of: Ints, sources: Sequence[tuple[Ints, Floats]], ranks_per_node: int) -> float:
    """Return the fraction of all bytes that go to another node, if each sample runs on rank `rank_of` [N]."""
    across = sum(float(size[rank_of // ranks_per_node != home // ranks_per_node].sum()) for home, size in sources)
    return across / max(1.0, sum(float(size.sum()) for _, size in sources))


def corpus(samples: int, seed: int) -> tuple[Ints, Ints]:
    """Tiles and tokens: most samples have one tile, some up to seven, few none."""
    random = np.random.default_rng(seed)
    tiles = random.choice([0, 1, 3, 4, 5, 7], samples, p=[0.03, 0.70, 0.11, 0.05, 0.05, 0.06])
    text = np.maximum(8, random.lognormal(np.log(170), 0.8, samples)).astype(np.int64)
    return tiles, np.minimum(256 * tiles + text, 4096)


def longest_first(seconds: Floats, ranks: int) -> Ints:
    """The baseline: each sample to the lightest rank, the longest first."""
    lightest = [(0.0, rank) for rank in range(ranks)]
    place = np.zeros(len(seconds), np.int64)
    for sample in np.argsort(-seconds, kind="stable"):
        load, place[sample] = lightest[0]
        heapq.heapreplace(lightest, (load + seconds[sample], place[sample]))
    return place


def least(phase: Phase, units: Ints, ranks: int) -> float:
    """What the fullest rank has at least."""
    seconds = phase.seconds(units)
    mean = float(seconds.sum()) / ranks if phase.quadratic else phase.linear * math.ceil(units.sum() / ranks)
    return max(mean, float(seconds.max()))


def measure(ranks: int, each: int, draws: int, phases: dict[str, Phase]) -> tuple[list[float], float, float]:
    """A row of the table; seconds of the steps as read, and ours."""
    home, rows, read, ours, seconds = np.repeat(np.arange(ranks), each), [], 0.0, 0.0, []
    for seed in range(draws):
        tiles, tokens = corpus(ranks * each, seed)
        needs = {
            "vision": PhaseInput(phases["vision"], tiles, tiles * BYTES_A_TILE),
            "language": PhaseInput(
                phases["language"], tokens, tokens * BYTES_A_TOKEN, {"vision": tiles * BYTES_OF_FEATURES}
            ),
        }
        began = time.perf_counter()
        placed = plan_step(home, needs, ranks, A_NODE)
        seconds.append(time.perf_counter() - began)
        row = []
        for name, need in needs.items():
            first = longest_first(need.phase.seconds(need.units), ranks)
            for place in (home, first, placed[name].rank_of):
                row.append(wait(need.phase.of_batches(need.units, place, ranks)[None, :, None]))
            row.append(placed[name].after / least(need.phase, need.units, ranks))
            read, ours = read + placed[name].before, ours + placed[name].after
        batch, sources = phases["language"].assign(tokens, ranks), [(home, tokens.astype(np.float64))]
        there = place_batches(batch, sources, ranks, A_NODE)[batch]
        row += [fraction_across_nodes(place, sources, A_NODE) for place in (batch, there)]
        rows.append(row)
    return [*np.mean(rows, axis=0).tolist(), 1e3 * float(np.median(seconds))], read, ours


def main() -> None:
    """Print the table, and end with the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=60, help="random batches of each shape")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="so many of the shapes, the first ones")
    arguments = parser.parse_args()
    phases = phases_of(PackCosts.of_model())
    measure(8, 4, 1, phases)  # compile outside the clock
    rows, read, ours = [], 0.0, 0.0
    for ranks, each in SHAPES[: arguments.shapes]:
        row, before, after = measure(ranks, each, arguments.draws, phases)
        rows.append((ranks, each, *(f"{value:.3f}" for value in row[:-1]), f"{row[-1]:.1f}"))
        read, ours = read + before, ours + after
    columns = (
        "ranks", "samples each", "vision: wait as read", "longest first", "ours", "fullest", "language: wait as read",
        "longest first", "ours", "fullest", "across nodes", "placed", "ms a plan",
    )  # fmt: skip
    print_table("Batches balanced as they come", columns, rows)
    print(f"seconds of steps, ours over as read: {ours / read:.3f}")


if __name__ == "__main__":
    run_tool(main)
