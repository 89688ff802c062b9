"""What a plan is worth for the models people train today: joint plans against the whole ViT in the first stage.

    python benchmarks/model_families.py [--seconds 4] [--models 12]

Analytic profiles of an H100 (no device needed), full packs, 1F1B. Both plans are of the same profile, sizes, memory and
number of microbatches; the other one has patch embedding, ViT and projector in the first stage, as Megatron's own
encoders are placed, and the language model cut as evenly as whole layers go. Beside it stands AdaPipe's plan of the
same (`adapipe.py`). What is printed as faster is simulated. "Of text-only" is the speed over that of the language model
alone, planned alike, without the tower's work.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.adapipe import adapipe_layout
from omnibal_ext.architectures.presets import preset
from omnibal_ext.console import print_table
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.tower import language_profile
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.layout.partition import even_edges, layer_weights
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import find_layouts, judge

DEVICE, MEMORY_BYTES, MICROBATCHES, DATA_PARALLEL, TOKENS = "h100", 72 * 2**30, 32, 8, 8192
"""Of the joint search."""


@dataclass(frozen=True)
class Case:
    """A model, and on how many tensor- and pipeline-parallel ranks."""

    model: str
    tensor: int
    pipeline: int
    tiles: int
    """Of a full pack: tiles, or patches at native resolution."""


CASES = (
    Case("internvl3.5-8b", 2, 4, 24),
    Case("internvl3.5-38b", 4, 4, 24),
    Case("qwen2-vl-7b", 2, 4, 16384),
    Case("qwen2.5-vl-7b", 2, 4, 16384),
    Case("qwen2.5-vl-32b", 4, 4, 16384),
    Case("qwen2.5-vl-72b", 8, 8, 16384),
    Case("qwen3-vl-8b", 2, 4, 16384),
    Case("qwen3-vl-32b", 4, 4, 16384),
    Case("qwen3-vl-30b-a3b", 4, 4, 16384),
    Case("qwen3.5-27b", 4, 4, 16384),
    Case("qwen3.5-35b-a3b", 4, 4, 16384),
    Case("internvl3.5-30b-a3b", 4, 4, 24),
    Case("gemma-3-12b", 4, 4, 24),
    Case("gemma-3-27b", 8, 4, 24),
    Case("gemma-4-31b", 8, 4, 2520 * 6),
    Case("gemma-4-26b-a4b", 4, 4, 2520 * 6),
    Case("gemma-4-e4b", 1, 4, 2520 * 6),
    Case("mistral-small-3.1-24b", 4, 4, 16384),
    Case("glm-4.1v-9b", 2, 4, 16384),
    Case("glm-4.6v", 8, 8, 16384),
)


def main() -> None:
    """Plan, compare, print; the last line is the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of work, to search each layout")
    parser.add_argument("--models", type=int, default=len(CASES), help="the first of them (all)")
    arguments = parser.parse_args()
    rows, ratios = [], []
    for case in CASES[: arguments.models]:
        profile = analytic_profile(
            preset(case.model),
            DEVICE,
            {"tiles": case.tiles, "tokens": TOKENS},
            case.tensor,
            DATA_PARALLEL,
            distributed_optimizer=True,
        )
        problem = LayoutProblem(profile, case.pipeline, MICROBATCHES, memory_bytes=MEMORY_BYTES)
        best = find_layouts(problem, "joint", seconds=arguments.seconds)[0]
        text = find_layouts(replace(problem, profile=language_profile(profile)), "joint", seconds=arguments.seconds)[0]
        shares = [f"{seconds / best.step_seconds:.1%}" for seconds in (problem.ideal_seconds(), text.step_seconds)]
        others = [
            None if other is None else other / best.step_seconds for other in (vit_first(problem), adapipe(problem))
        ]
        ratios += [others[0]] if others[0] else []
        told = ["does not fit" if ratio is None else f"{ratio:.2f}x" for ratio in others]
        cuts = " ".join(map(str, np.diff(best.layout.edges)))
        rows.append((case.model, f"{case.tensor} x {case.pipeline}", cuts, *shares, *told))
    columns = ("model", "tensor x pipeline", "layers a stage", "of ideal", "of text-only", "faster than ViT first",
               "than AdaPipe")  # fmt: skip
    print_table(f"joint plans, {DEVICE}, {MICROBATCHES} microbatches", columns, rows)
    print(f"joint against the whole ViT in the first stage: {min(ratios):.2f}x at least, {max(ratios):.2f}x at most")


def vit_first(problem: LayoutProblem) -> float | None:
    """Seconds of an iteration with the whole ViT in the first stage; None where no recomputation makes that fit."""
    chain = problem.profile.chain
    begin = chain.index("word_embed")
    language = even_edges(layer_weights(problem, "profile")[begin:], problem.stages - 1)
    edges = (0, *(begin + edge for edge in language))
    try:
        return judge(problem, [edges])[0].step_seconds
    except UserError:
        return None


def adapipe(problem: LayoutProblem) -> float | None:
    """Seconds of an iteration with AdaPipe's layout; None where it finds none that fits."""
    try:
        return problem.step_seconds(adapipe_layout(problem))
    except UserError:
        return None


if __name__ == "__main__":
    run_tool(main)
