"""What LLaMA-Factory and axolotl run today for samples with images, and by our doors: lengths alone, no model is run.

    python benchmarks/door_packs.py [--samples 12000] [--corpora NAME...]

LLaMA-Factory packs a thousand samples at a time by tokens (its own function where it is installed, else written anew:
the longest that still fits), and fills each pack up to `cutoff_len`; its door packs the same thousands with both
budgets, and fills none up. axolotl packs no images: a batch of 4 samples is padded to its longest; its door packs all.
"run" is tokens that are run over those of samples, "tiles" the fullest pack or batch over the budget. The last line is
tokens run today over those run by our doors.
"""

import argparse
import sys
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.level import PUBLISHED, corpus_of
from omnibal_ext.console import print_table
from omnibal_ext.errors import run_tool
from omnibal_ext.packing import pack
from omnibal_ext.sizes import Sizes

BUFFER, BATCH = 1000, 4
Groups = list[list[int]]


def longest_that_fits(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the lengths of each pack: the longest that is left, then the longest that still fits."""
    left, packs = sorted(lengths), []
    while left:
        room, chosen = capacity, []
        while at := bisect(left, room):
            chosen.append(left.pop(at - 1))
            room -= chosen[-1]
        packs.append(chosen)
    return packs


def by_tokens(sizes: Sizes, order: np.ndarray, most: int) -> Groups:
    """LLaMA-Factory's packs of a buffer."""
    try:
        from llamafactory.data.processor.processor_utils import greedy_knapsack
    except ImportError:
        greedy_knapsack = longest_that_fits
    of_length: dict[int, list[int]] = {}
    for sample in order.tolist():
        of_length.setdefault(int(sizes.tokens[sample]), []).append(sample)
    packs = greedy_knapsack(sizes.tokens[order].tolist(), most)
    return [[of_length[length].pop() for length in lengths] for lengths in packs]


def row(name: str, sizes: Sizes, groups: Groups, run: int, most_tiles: int) -> tuple[str, int, str, str]:
    """Name, packs, tokens that are run over the samples', and the fullest in tiles over the budget."""
    fullest = max(int(sizes.tiles[group].sum()) for group in groups)
    return name, len(groups), f"{run / int(sizes.tokens.sum()):.3f}", f"{fullest / most_tiles:.2f}"


def compare(name: str, samples: int) -> list[float]:
    """Print a corpus; return tokens run today over those by our doors, of both trainers."""
    sizes, (most_tiles, most) = corpus_of(name, samples)
    order = np.random.default_rng(0).permutation(len(sizes))
    buffers = [order[at : at + BUFFER] for at in range(0, len(order), BUFFER)]
    theirs = [group for buffer in buffers for group in by_tokens(sizes, buffer, most)]
    ours = [buffer[group].tolist() for buffer in buffers
            for group in pack(sizes.tiles[buffer], sizes.tokens[buffer], most_tiles, most)]  # fmt: skip
    padded = [order[at : at + BATCH].tolist() for at in range(0, len(order), BATCH)]
    whole = pack(sizes.tiles, sizes.tokens, most_tiles, most)
    useful, filled = int(sizes.tokens.sum()), len(theirs) * most
    longest = sum(len(group) * int(sizes.tokens[group].max()) for group in padded)
    print_table(f"{name}: {len(sizes):,} samples, {most_tiles:,} tiles and {most:,} tokens",
                ("", "packs", "run", "tiles"),
                [row("LLaMA-Factory, packing", sizes, theirs, filled, most_tiles),
                 row("by our door", sizes, ours, useful, most_tiles),
                 row(f"axolotl, {BATCH} samples a batch", sizes, padded, longest, most_tiles),
                 row("by our door", sizes, whole, useful, most_tiles)])  # fmt: skip
    return [filled / useful, longest / useful]


def main() -> None:
    """Print the tables, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=12_000)
    parser.add_argument("--corpora", nargs="+", default=[PUBLISHED, "single tiles", "patches"])
    arguments = parser.parse_args()
    ratios = np.median([compare(name, arguments.samples) for name in arguments.corpora], axis=0)
    print(f"tokens run over those by our doors, median: LLaMA-Factory {ratios[0]:.2f}x, axolotl {ratios[1]:.2f}x")


if __name__ == "__main__":
    run_tool(main)
