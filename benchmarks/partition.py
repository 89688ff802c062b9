"""Layout methods side by side, measured: plans by parameters, layers, profile, bmp and joint, trained in turns.

    python benchmarks/partition.py [--launches 4] [--rounds 5] [--models 3]

Three models (ViT-heavy, even, heavy in the language model) on two gloo ranks, in two pipelines: 1F1B, where two ranks
leave one cut to choose, and interleaved with two chunks a rank, where there are three. Each model is profiled once, and
all plans come from that profile, for the same packs, memory and schedule. Recomputation: the fewest layers that fit;
joint chooses it together with the cuts. Needs two idle cores.

A round runs every plan once, in an order of its own; a ratio is the median over all rounds of both plans' seconds in
the same round. Beside it stand the least and the greatest launch's: the same two plans change by a few percent from
launch to launch, and what differs by less is a tie. Equal plans are trained once.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.two_ranks import Case, Llama, Packs, Shape, Trained, profile, sizes_of, train
from omnibal_ext.console import print_table
from omnibal_ext.errors import run_tool
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.recompute import recompute_all
from omnibal_ext.layout.search import find_layouts, make_plan
from omnibal_ext.modalities.vision.architecture import VisionArchitecture

METHODS = ("parameters", "layers", "profile", "bmp", "joint")
PIPELINES = (("1f1b", 1), ("interleaved", 2))
"""Schedule and chunks a rank."""
MICROBATCHES = 6
ROOM = 0.3
"""Memory of a rank, between what the even cut needs with every layer recomputed (0) and with none (1)."""


def _shape(name: str, vision_layers: int, language_layers: int) -> Shape:
    """As in InternVL: a narrow ViT with many tokens, a wide language model."""
    return Shape(
        name,
        VisionArchitecture(vision_layers, 64, 4, 256, patch_size=8, image_size=64),
        Llama(language_layers, 256, 4, 2, 768, vocab_size=512),
        vit_budget=8,
        llm_budget=256,
    )


# A language model's layer takes about three times as long as one of the ViT.
SHAPES = (_shape("ViT-heavy", 20, 4), _shape("even", 24, 8), _shape("LLM-heavy", 8, 10))


def main() -> None:
    """Profile, plan, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=4, help="starts of torchrun a table (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="iterations of each plan a launch (default %(default)s)")
    parser.add_argument("--models", type=int, default=len(SHAPES), help="the first of them (all)")
    arguments = parser.parse_args()
    rows = []
    for shape in SHAPES[: arguments.models]:
        costs, packs = profile(shape), _packs(shape)
        for schedule, chunks in PIPELINES:
            problem = LayoutProblem(costs, 2, MICROBATCHES, chunks, schedule, packs=sizes_of(packs))
            problem = replace(problem, memory_bytes=_memory(problem))
            ratios = compare(shape, problem, packs, arguments.launches, arguments.rounds)
            rows.append((shape.name, schedule, *ratios))
    print_table(
        "joint is faster than", ("model", "schedule", *METHODS[:-1]), [(*row[:2], *map(_told, row[2:])) for row in rows]
    )
    worst = min(_median(launches) for row in rows for launches in row[2:])
    print(f"joint against the best other method: {worst:.2f}x at worst")


def compare(shape: Shape, problem: LayoutProblem, packs: Packs, launches: int, rounds: int) -> list[list[list[float]]]:
    """For each method but joint: its seconds over joint's, by launch and round. Prints the table of the plans."""
    plans = {method: make_plan(problem, find_layouts(problem, method)[:1], method) for method in METHODS}
    distinct = {plan.stages: Case(method, plan, packs) for method, plan in plans.items()}
    runs = [dict(zip(distinct, train(shape, list(distinct.values()), rounds), strict=True)) for _ in range(launches)]
    rows = []
    for method, plan in plans.items():
        layers = " | ".join(str(stage.layers[1] - stage.layers[0]) for stage in plan.stages)
        again = " | ".join(str(len(stage.recompute)) for stage in plan.stages)
        measured = statistics.median(seconds for run in runs for seconds in run[plan.stages].seconds)
        peak = f"{max(runs[0][plan.stages].peak_bytes) / 2**20:.0f}"
        predicted = plan.predicted["step_seconds"]
        rows.append((method, layers, again, f"{predicted * 1e3:.0f}", f"{measured * 1e3:.0f}", peak))
    columns = ("method", "layers", "recomputed", "predicted ms", "measured ms", "peak MiB")
    title = f"{shape.name}, {problem.schedule_name}, {problem.memory_bytes / 2**20:.0f} MiB a rank"
    print_table(title, columns, rows)
    return [[_ratios(run[plans[m].stages], run[plans["joint"].stages]) for run in runs] for m in METHODS[:-1]]


def _ratios(other: Trained, joint: Trained) -> list[float]:
    return [a / b for a, b in zip(other.seconds, joint.seconds, strict=True)]


def _median(launches: list[list[float]]) -> float:
    return statistics.median(ratio for rounds in launches for ratio in rounds)


def _told(launches: list[list[float]]) -> str:
    medians = [statistics.median(rounds) for rounds in launches]
    if set(medians) == {1.0}:
        return "same plan"
    return f"{_median(launches):.2f}x ({min(medians):.2f}-{max(medians):.2f})"


def _memory(problem: LayoutProblem) -> float:
    """Enough for every method's cut with all layers recomputed, too little for the even cut with none."""
    cuts = [find_layouts(problem, method)[0].layout for method in METHODS[:-1]]
    least = max(max(problem.stage_peak_bytes(recompute_all(problem, cut.edges))) for cut in cuts)
    most = max(problem.stage_peak_bytes(cuts[METHODS.index("profile")]))
    return least + ROOM * max(most - least, 0.1 * least)


def _packs(shape: Shape, seed: int = 0) -> Packs:
    """Nearly full packs, as balanced packing makes them; three samples each."""
    random = np.random.default_rng(seed)
    packs = []
    for _ in range(MICROBATCHES):
        tiles = int(random.integers(shape.vit_budget - 2, shape.vit_budget + 1))
        tokens = int(random.integers(shape.llm_budget * 9 // 10, shape.llm_budget + 1))
        packs.append((tiles, (tokens // 2, tokens // 4, tokens - tokens // 2 - tokens // 4)))
    return tuple(packs)


if __name__ == "__main__":
    run_tool(main)
