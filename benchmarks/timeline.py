"""The picture in README.md: an iteration of InternViT-6B + InternLM2-20B before and after balancing, predicted.

    python benchmarks/timeline.py [--output docs/timeline.png]

Four pipeline ranks of A100s (tensor parallel 2, the optimizer sharded over four replicas, of which one is drawn),
analytic costs, the made-up corpus of `paper_tables.py`. Before: random padded batches, cut by parameters, every layer
recomputed. After: balanced packs and the joint plan. The last line is the ratio of samples a second over eight
iterations, of which the first is drawn.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.paper_tables import MEMORY, MODEL, Batch, workload
from benchmarks.picture import write_png
from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.errors import run_tool
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import find_layouts
from omnibal_ext.report.timeline import Timeline, predicted

TENSOR, RANKS, REPLICAS, SAMPLES = 2, 4, 4, 48
"""Samples an iteration, of one data-parallel rank."""
ITERATIONS = 8


def main() -> None:
    """Plan both ways, draw one iteration of each, print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="docs/timeline.png", help="picture to write (default %(default)s)")
    arguments = parser.parse_args()
    before, slow = drawn("before", "random", "parameters", "full")
    after, fast = drawn("after", "balanced", "joint", "fewest")
    write_png(arguments.output, [before, after])
    print(f"wrote {arguments.output}")
    print(f"after / before samples per second: {fast / slow:.2f}x")


def drawn(name: str, packing: str, method: str, recompute: str) -> tuple[Timeline, float]:
    """One iteration, and predicted samples a second."""
    corpus = workload(packing, 1, Batch(SAMPLES, "samples"))
    work = corpus.workload(ITERATIONS)
    costs = analytic_profile(
        preset(MODEL), "a100", {"tiles": work.vit_budget, "tokens": work.llm_budget}, TENSOR, REPLICAS
    )
    microbatches = work.packs.tiles.shape[-1]
    problem = LayoutProblem(costs, RANKS, microbatches, memory_bytes=MEMORY, packs=work.packs)
    layout = find_layouts(problem, method, recompute=recompute, seconds=2.0)[0].layout
    speed = corpus.mean_samples / problem.step_seconds(layout)
    timeline = predicted(problem, layout)
    return replace(timeline, name=f"{name}: {corpus.mean_samples:.0f} samples, {timeline.seconds:.1f} s"), speed


if __name__ == "__main__":
    run_tool(main)
