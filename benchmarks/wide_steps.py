"""Are packs of two ranks priced right? Predicted against measured steps of six mixes, on two ranks of this machine.

    python benchmarks/wide_steps.py [--rounds 9]

A small model is profiled as users profile theirs. Then iterations in which two data-parallel ranks run none, some or
all of their packs together, of long samples that are cut or of short ones that are not, are predicted from it and
trained in turns by the real executor. Measured are seconds of the busier rank's processor, so that other work on the
machine does not count; by the clock there is what ranks wait for each other as well.
"""

import argparse
import statistics
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.two_ranks import Case, Llama, Packs, Shape, profile, train
from omnibal_ext.console import print_table
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.errors import run_tool
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.workload import packs_of_loads
from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.packing.packs import TILES, PackList
from omnibal_ext.packing.shard_loads import shard_loads
from omnibal_ext.plan import Plan
from omnibal_ext.sizes import Sizes

SHAPE = Shape(
    "wide",
    VisionArchitecture(layers=3, hidden_size=192, heads=4, ffn_hidden_size=768, patch_size=8, image_size=48),
    Llama(layers=4, hidden_size=256, heads=8, kv_heads=4, ffn_hidden_size=768, vocab_size=512),
    vit_budget=8,
    llm_budget=512,
)
NARROW, FULL = (4, (64,) * 4), (8, (128,) * 4)
LONG, LONGER, SHORT = (8, (640,)), (16, (1000,)), (16, (64,) * 16)
MIXES: dict[str, tuple[Packs, tuple[int, ...]]] = {
    "four narrow": ((NARROW,) * 4, (1,) * 4),
    "one long, two narrow": ((LONG, NARROW, NARROW), (2, 1, 1)),
    "one longer, two full": ((LONGER, FULL, FULL), (2, 1, 1)),
    "two longer, two full": ((LONGER, LONGER, FULL, FULL), (2, 2, 1, 1)),
    "short samples together": ((SHORT, SHORT, SHORT), (2, 2, 2)),
    "four longer": ((LONGER,) * 4, (2,) * 4),
}
"""Packs, tiles and lengths of samples, and how many ranks run each; those of one rank in pairs."""
RANKS = 2


def main() -> None:
    """Profile, predict, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="iterations of each mix (default %(default)s)")
    rounds = parser.parse_args().rounds
    cases = [case_of(name, *mix) for name, mix in MIXES.items()]
    costs = profile(SHAPE, data_parallel=RANKS)
    trained = train(SHAPE, cases, rounds, pipeline=1, count_bytes=False)
    rows, steps = [], []
    for case, found in zip(cases, trained, strict=True):
        sizes = sizes_of(case.packs, case.widths)
        seconds, measured = predict(costs, sizes), statistics.median(map(max, found.work))
        assert sizes.exchanged is not None
        steps.append((seconds, measured))
        sent = f"{int(sizes.exchanged.sum()):,}"
        clock = f"{statistics.median(found.seconds) * 1e3:.1f}"
        figures = (f"{seconds * 1e3:.1f}", f"{measured * 1e3:.1f}", f"{seconds / measured - 1:+.1%}")
        rows.append((case.name, sent, *figures, clock))
    columns = ("mix", "tokens sent", "predicted ms", "measured ms", "error", "by the clock")
    print_table(f"{rounds} rounds", columns, rows)
    ratios = [seconds / measured for seconds, measured in steps]
    usual = statistics.median(ratios)
    pairs = [*combinations(steps, 2)]
    right = sum((one[0] < other[0]) == (one[1] < other[1]) for one, other in pairs)
    print(
        f"predicted over measured: median {usual:.2f}, largest error {max(abs(r - 1) for r in ratios):.1%}; beside the "
        f"median largest {max(abs(r / usual - 1) for r in ratios):.1%}; {right} of {len(pairs)} pairs ranked right"
    )


def case_of(name: str, packs: Packs, widths: tuple[int, ...]) -> Case:
    """On one stage."""
    plan = Plan.from_cuts(SHAPE.architecture.chain, (), num_microbatches=sum(widths) // RANKS)
    return Case(name, plan, packs, widths=widths)


def predict(costs: Profile, sizes: PackSizes) -> float:
    """Step seconds."""
    problem = LayoutProblem(costs, 1, sizes.tokens.shape[-1], packs=sizes)
    return problem.step_seconds(Layout((0, len(costs.chain)), ((),)))


def sizes_of(packs: Packs, widths: tuple[int, ...]) -> PackSizes:
    """For the simulator, as an index has them: one iteration, two ranks."""
    lengths = [length for _, samples in packs for length in samples]
    offsets = np.cumsum([0, *(len(samples) for _, samples in packs)])
    held = PackList(offsets, np.arange(len(lengths)))
    ranks = np.array(widths)
    loads = shard_loads(held, Sizes.from_arrays(np.zeros(len(lengths), np.int64), np.array(lengths)), ranks)
    loads[:, TILES] = -(-np.array([tiles for tiles, _ in packs]) // ranks)
    return packs_of_loads(loads[:, :3], slots_of(widths)[None], loads[:, 3], ranks)


def slots_of(widths: tuple[int, ...]) -> NDArray[np.int64]:
    """Who runs what: [ranks, microbatches]."""
    numbers = np.repeat(np.arange(len(widths)), widths)
    return np.ascontiguousarray(numbers.reshape(-1, RANKS).T)


if __name__ == "__main__":
    run_tool(main)
